"""A recording of another run, in the place of a rollout service."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from actors.rollouts.rollout import RolloutRequest
from environments.errors import ConfigError, TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.training.engine_comparison import EngineComparison
from launch.training.recording import RecordedRollouts, check_tokenizer
from launch.training.stages.base import parts_needed
from launch.training.stages.chosen import chosen_stages
from launch.training.trainer import check_training
from launch.validation.replay import check_recording, check_replay
from launch.validation.resources import num_gpus, num_replicas, num_rollout_actors
from launch.workload import load_workload
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.samples import LearnerUpdate
from policies.tiny import build_tokenizer


def trajectory(group: int, member: str, has_tokens: bool = True) -> Trajectory:
    completion = Completion(
        prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,), text="a", finish_reason="stop"
    )
    return Trajectory(
        steps=[Step(chat_completions=[], model_response="a", completion=completion if has_tokens else None)],
        reward=group + (member == "0001"),
        rollout_id=f"{group:08d}/{member}",
        task={"group": group},
        termination_reason=TerminationReason.ENV_DONE,
    )


def group(number: int, has_tokens: bool = True) -> TrajectoryGroup:
    members = tuple(trajectory(number, member, has_tokens) for member in ("0000", "0001"))
    baseline = trajectory(number, "greedy", has_tokens)
    return TrajectoryGroup(
        group_id=f"{number:08d}", task={"group": number}, trajectories=members, baseline=baseline
    )


def recorded(folder: Path, kept: int = 10, has_tokens: bool = True) -> Path:
    """Three updates of two groups each, of which the second was left out."""
    folder.mkdir(exist_ok=True)
    log = TrajectoryLog(folder, kept)
    for step in (1, 2, 3):
        trained, dropped = group(2 * step - 2, has_tokens), group(2 * step - 1, has_tokens)
        log.record_update(step, [trained], {"zero_signal": [dropped]}, {})
    return folder


def recorded_update(folder: Path, *trajectories: Trajectory) -> Path:
    """A run of one update with one group."""
    folder.mkdir()
    one = TrajectoryGroup(group_id="00000000", task={}, trajectories=trajectories)
    TrajectoryLog(folder, 10).record_update(1, [one], {}, {})
    return folder


def source(folder: Path, num_groups: int) -> RecordedRollouts:
    """The recording in ``folder``, of which so many groups were requested."""
    rollouts = RecordedRollouts(folder)
    names = [f"{number:08d}" for number in range(num_groups)]
    rollouts.request([RolloutRequest(rollout_id=f"{each}/0000", group_id=each, task={}) for each in names])
    return rollouts


def test_groups_come_whole_and_those_that_were_left_out_too(tmp_path: Path) -> None:
    stream = source(recorded(tmp_path), 7)
    for number in range(6):
        taken = stream.take(f"{number:08d}")
        assert taken == group(number)
    with pytest.raises(TroupeError, match="no rollouts of group 6: it made fewer updates"):
        stream.take("00000006")


def test_groups_of_another_order_come_by_update_without_gaps(
    tmp_path: Path,
) -> None:
    log = TrajectoryLog(tmp_path, 10)
    log.record_update(1, [group(5), group(0)], {"zero_signal": [group(2)]}, {})
    log.record_update(2, [group(4), group(1)], {}, {})
    stream = source(tmp_path, 3)
    taken = [stream.take(f"{number:08d}") for number in range(3)]
    assert [each.task["group"] for each in taken] == [0, 2, 5]
    assert [each.rollout_id for each in taken[2].rollouts] == [
        f"00000002/{member}" for member in ("0000", "0001", "greedy")
    ]
    assert source(tmp_path, 5).take("00000004").task == {"group": 4}, "a resumed replay goes on there"


def test_resumed_replay_finds_the_groups_that_come_next(tmp_path: Path) -> None:
    assert source(recorded(tmp_path), 5).take("00000004") == group(4)


def test_recording_that_is_not_whole_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trajectories"):
        check_recording(tmp_path, 1)
    check_recording(recorded(tmp_path / "whole"), 3)
    with pytest.raises(
        ConfigError, match=r"has made 3 updates, .* would make 4: lower run\.num_steps.* by 1"
    ):
        check_recording(tmp_path / "whole", 4)
    with pytest.raises(ConfigError, match=r"updates 2 to 3 only.*run\.trajectories_kept"):
        check_recording(recorded(tmp_path / "part", kept=2), 3)
    with pytest.raises(ConfigError, match="turns without tokens"):
        check_recording(recorded(tmp_path / "outside", has_tokens=False), 3)
    of_first = trajectory(0, "0000", True)
    of_first.steps[0].completion = replace(of_first.completions[0], policy="first")
    with pytest.raises(ConfigError, match="was played by the policies first, and a replay trains one"):
        check_recording(recorded_update(tmp_path / "several", of_first), 1)


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.max_staleness=2",
        "server.http_port=8000",
        "evaluation.every=5",
        "run.best_metric=eval/reward_mean",
    ],
)
def test_setting_that_needs_an_engine_is_an_error(setting: str, tmp_path: Path) -> None:
    config = compose(["recipe=calculator", f"run.replay={recorded(tmp_path)}", "run.num_steps=3", setting])
    with pytest.raises(ConfigError, match=r"needs an engine, and run\.replay starts none"):
        check_replay(config, 3)


def test_missing_update_is_named_before_the_run_starts(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    (folder / "trajectories" / "step_000002.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"lacks the rollouts of update 2: .* or make 1 updates"):
        check_recording(folder, 3)
    check_recording(folder, 1)


def test_turn_without_tokens_may_stand_beside_others(tmp_path: Path) -> None:
    mixed = trajectory(0, "0000")
    mixed.steps.append(Step(chat_completions=[], model_response="by the agent's own code"))
    check_recording(recorded_update(tmp_path / "mixed", mixed), 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"logprobs": ()}, "without log-probabilities"),
        ({"retokenized": True}, "not the engine's"),
        ({"prompt_ids": ()}, "not the engine's"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_an_error(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    sampled = trajectory(0, "0000")
    completion = sampled.steps[0].completion
    assert completion is not None
    sampled.steps[0].completion = replace(completion, **change)
    with pytest.raises(ConfigError, match=f"{sentence}.*: replay another run"):
        check_recording(recorded_update(tmp_path / "run", sampled), 1)


def test_replay_does_not_overwrite_its_recording(tmp_path: Path) -> None:
    config = compose(
        [
            "recipe=calculator",
            "evaluation.every=0",
            f"run.replay={recorded(tmp_path)}",
            f"run.directory={tmp_path}/../{tmp_path.name}",
        ]
    )
    with pytest.raises(ConfigError, match=r"overwrite its own recording: name another run\.directory"):
        check_replay(config, 3)


def replayed(tmp_path: Path, *settings: str) -> list[str]:
    """Settings of a replay of three updates."""
    recording = recorded(tmp_path / "recorded")
    return ["recipe=calculator", f"run.replay={recording}", "evaluation.every=0", *settings]


def test_updates_of_all_stages_are_counted(tmp_path: Path) -> None:
    iterations = ("stages=[warm_start,expert_iteration]", "expert_iteration.num_steps=3", "run.num_steps=30")
    config = compose(replayed(tmp_path, *iterations))
    check_training(config, load_workload(config.workload, config.seed))


def test_replay_needs_no_environment_that_runs_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = compose(replayed(tmp_path, "run.num_steps=3"))
    workload = load_workload(config.workload, config.seed)

    class NotHere(workload.env_class):  # type: ignore[misc, name-defined]
        def reset(self) -> Any:
            raise AssertionError("the environment was played")

    check_training(config, replace(workload, env_class=NotHere))
    assert caplog.messages == []


def test_replay_reserves_nothing_for_engines_and_actors(tmp_path: Path) -> None:
    config = compose(replayed(tmp_path, "run.num_steps=3", "server.engine.num_gpus=1"))
    stages, workload = chosen_stages(config), load_workload(config.workload, config.seed)
    needed = parts_needed(config, stages, workload)
    assert (num_replicas(needed), num_rollout_actors(needed), num_gpus(needed)) == (0, 0, 0)
    played = parts_needed(replace(config, run=replace(config.run, replay=None)), stages, workload)
    assert (num_replicas(played), num_rollout_actors(played)) == (1, config.fleet.num_actors)


@pytest.mark.slow
def test_recording_of_another_tokenizer_shows_both_texts(tmp_path: Path) -> None:
    for name, words in (("own", "The answer is 42."), ("other", "Wholly different words.")):
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
        build_tokenizer([talk] * 3).save_pretrained(tmp_path / name)
    ids = ChatRenderer(load_tokenizer(tmp_path / "own")).encode("The answer is 42.")
    sampled = trajectory(0, "0000")
    sampled.steps[0].completion = Completion(
        prompt_ids=(1,),
        completion_ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        text="The answer is 42.",
        finish_reason="stop",
    )
    folder = recorded_update(tmp_path / "run", sampled)
    check_tokenizer(folder, str(tmp_path / "own"))
    with pytest.raises(ConfigError, match=r"another tokenizer: .*'The answer is 42\.'.*Set model\.path"):
        check_tokenizer(folder, str(tmp_path / "other"))


@pytest.mark.slow
def test_prompt_that_another_vocabulary_misreads_is_an_error(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "42"}
    questions = {"own": "Which number is it?", "other": "Find a word, please."}
    for name, words in questions.items():
        talk = [{"role": "user", "content": words}, answer]
        build_tokenizer([talk] * 3).save_pretrained(tmp_path / name)
    own = ChatRenderer(load_tokenizer(tmp_path / "own"))
    other = ChatRenderer(load_tokenizer(tmp_path / "other"))
    answer_ids = tuple(own.encode("42"))
    assert other.decode(answer_ids) == "42"  # the answers tell nothing
    sampled = trajectory(0, "0000")
    sampled.steps[0].completion = Completion(
        prompt_ids=tuple(own.encode(questions["own"])),
        completion_ids=answer_ids,
        logprobs=(-1.0,) * len(answer_ids),
        text="42",
        finish_reason="stop",
    )
    folder = recorded_update(tmp_path / "run", sampled)
    checkpoints = folder / "checkpoints"
    shutil.copytree(tmp_path / "own", checkpoints / "step_000001" / "huggingface")
    (checkpoints / "latest").symlink_to("step_000001")
    check_tokenizer(folder, str(tmp_path / "own"))
    with pytest.raises(ConfigError, match=r"the text 'Which number is it\?'.*set seed as well"):
        check_tokenizer(folder, str(tmp_path / "other"))


def test_replay_compares_no_learner_with_an_engine() -> None:
    config, nothing = compose(["run.replay=runs/a"]), cast(Any, None)
    comparison = EngineComparison(config, algorithm_of(config), nothing, None, nothing)
    update = LearnerUpdate(metrics={"learn/rollout_logprob_diff_mean": 0.3}, num_optimizer_steps=1)
    assert comparison.after_update(update) == comparison.before_update(0, []) == {}
