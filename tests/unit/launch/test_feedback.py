"""Training from feedback: recordings as demonstrations of a workload, and as rollouts of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.rollouts.rollout import RolloutRequest
from environments.data.recordings import Feedback, RecordedAnswer, Recordings, read_recordings
from environments.errors import ConfigError
from environments.types import Completion, Message, Step, TerminationReason, Trajectory
from launch.recipes import feedback
from launch.recipes.feedback import feedback_workload, main, write_rollouts
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.training.recording import RecordedRollouts
from launch.validation.replay import check_recording
from launch.workload import load_workload
from policies.learning.preferences import check_preferences


def recorded(folder: Path, num_prompts: int, scores: tuple[float, ...] = (1.0, -1.0)) -> Path:
    """Answers to several prompts, one for each score; every second one by a version on trial."""
    recordings = Recordings(folder, keep_days=30, readers=["training"])
    recordings.open()
    for prompt in range(num_prompts):
        for number, score in enumerate(scores):
            answer_id = f"resp_{100 * prompt + number:032x}"
            completion = Completion(
                text="2",
                prompt_ids=(prompt,),
                completion_ids=(number,),
                logprobs=(-0.5,),
                finish_reason="stop",
            )
            messages: list[Message] = [
                {"role": "user", "content": f"{prompt}+1?"},
                {"role": "assistant", "content": "2"},
            ]
            step = Step(chat_completions=messages, model_response="2", completion=completion)
            trajectory = Trajectory(
                task={"prompt": prompt}, steps=[step], termination_reason=TerminationReason.ENV_DONE
            )
            model = ("agent/a", "agent/a@2")[number % 2]
            answer = RecordedAnswer(answer_id=answer_id, owner="", model=model, created=prompt)
            assert recordings.write(answer, trajectory)
            recordings.add_feedback("", answer_id, Feedback(score=score))
    return folder


def test_workload_has_liked_answers_and_preferences(tmp_path: Path) -> None:
    own = load_workload("launch.recipes.calculator", 0)
    workload = feedback_workload(recorded(tmp_path, 2), own)
    assert [each[0]["content"] for each in workload.demonstrations] == ["0+1?", "1+1?"]
    assert workload.train_dataset is own.train_dataset
    (first, _) = workload.preferences
    assert isinstance(first.chosen, Trajectory) and first.chosen.completions[0].completion_ids == (0,)
    first.check("preference 0")
    with pytest.raises(ConfigError, match="has feedback on 1 answers, and none to learn from"):
        feedback_workload(recorded(tmp_path / "disliked", 1, (-1.0,)), own)


def test_masked_answers_are_in_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit has ended them, and a pair with one would keep the training from starting."""
    kept = read_recordings(recorded(tmp_path, 2))
    kept[1].trajectory.masked = True
    monkeypatch.setattr(feedback, "read_recordings", lambda *_: kept)
    workload = feedback_workload(tmp_path, load_workload("launch.recipes.calculator", 0))
    check_preferences(workload.preferences)
    assert len(workload.preferences) == 1


def test_replay_takes_answers_as_rollouts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written = write_rollouts(recorded(tmp_path / "recordings", 5), run, groups_per_step=2)
    assert len(written) == 4
    check_recording(run, 2)
    source = RecordedRollouts(run)
    names = [each.group_id for each in written]
    source.request([RolloutRequest(rollout_id=f"{each}/0000", group_id=each, task={}) for each in names])
    taken = [source.take(name) for name in names]
    assert [each.task for each in taken] == [{"prompt": number} for number in range(4)]
    assert [[each.reward for each in group.trajectories] for group in taken] == [[1.0, -1.0]] * 4
    assert taken[0].trajectories[0].completions == written[0].trajectories[0].completions


def test_command_writes_rollouts_and_shows_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(recorded(tmp_path / "recordings", 2)), str(tmp_path / "run")]
    assert main(arguments) == 2
    assert "answers to 2 prompts, and an update learns from 8: lower" in capsys.readouterr().err
    assert main([*arguments, "--groups-per-step", "1"]) == 0
    shown = re.findall(r"[a-z_.]+=\S*[^.\s]", capsys.readouterr().out)
    config = compose(shown)
    assert (config.run.num_steps, config.rollout.groups_per_step) == (2, 1)
    assert algorithm_of(config).correction_level == "token", "other weights have sampled them"
    assert main([*arguments, "--groups-per-step", "1"]) == 2
    assert "has trajectories already" in capsys.readouterr().err
