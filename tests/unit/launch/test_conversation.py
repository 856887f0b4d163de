"""Trajectories as text for the terminal, and as a table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch import play
from launch.export import export_parquet
from launch.export import main as export
from launch.reporting.conversation import MAX_LINES, best_and_worst, conversation
from launch.run_folder.trajectory_log import TrajectoryLog
from policies.sampler import SampleRequest, ScriptedSampler


def played(reward: float = 1.0, answer: str = "5", rollout_id: str = "00000000/0000") -> Trajectory:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 2+3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": answer},
    ]
    completion = Completion(
        prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -0.25), text=answer, finish_reason="stop"
    )
    steps = [
        Step(chat_completions=messages[:2], model_response="", reward=0.0, completion=completion),
        Step(chat_completions=messages, model_response=answer, reward=reward, completion=completion),
    ]
    return Trajectory(
        steps=steps,
        reward=reward,
        rollout_id=rollout_id,
        task={"question": "What is 2+3?"},
        termination_reason=TerminationReason.ENV_DONE,
    )


def test_picture_is_named_and_its_bytes_are_left_out() -> None:
    trajectory = played()
    address = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [address, {"type": "text", "text": "Which colour is it?"}]
    trajectory.steps[-1].chat_completions = [{"role": "user", "content": content}]
    assert conversation(trajectory).splitlines()[1:] == [
        "       user | [picture]",
        "            | Which colour is it?",
    ]


def test_conversation_shows_who_said_what_and_how_it_ended() -> None:
    assert conversation(played()).splitlines() == [
        "  reward 1, 2 turns, ended by env_done",
        "       user | What is 2+3?",
        '  assistant | {"name": "calculator", "arguments": {"expression": "2+3"}}',
        "       tool | 5",
        "  assistant | 5",
    ]


def test_long_message_keeps_its_beginning_and_its_end() -> None:
    lines = conversation(played(answer="\n".join(map(str, range(1000))) + "\n" + "x" * 1000)).splitlines()
    assert len(lines) == 4 + MAX_LINES + 1
    assert "995 lines" in "".join(lines) or "lines ..." in "".join(lines)
    assert lines[-1].endswith("x ...") and len(lines[-1]) < 180


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert (
        conversation(played(answer="\x1b[2Jgone\x07")).splitlines()[-1] == "  assistant | \ufffd[2Jgone\ufffd"
    )


def test_trajectory_without_a_step_says_why() -> None:
    failed = Trajectory(termination_reason=TerminationReason.ENV_ERROR, error="KeyError: 'x'\n  File ...")
    assert conversation(failed) == "  reward 0, 0 turns, ended by env_error; KeyError: 'x'"


def test_best_and_the_worst_are_chosen() -> None:
    rewards = [0.5, 1.0, 0.0, 0.25]
    assert [each.reward for each in best_and_worst([played(reward) for reward in rewards])] == [1.0, 0.0]
    assert len(best_and_worst([played()])) == 1


def test_table_holds_every_turn_whole(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, 10)
    group = TrajectoryGroup(group_id="00000000", task={"question": "?"}, trajectories=(played(), played(0.0)))
    log.record_update(1, [group], {}, {"00000000/0000": [0.5, -0.5]})
    log.record_evaluation(1, [group])
    assert export([str(tmp_path), "--parquet", str(tmp_path / "table.parquet")]) == 0
    rows = pq.read_table(tmp_path / "table.parquet").to_pylist()
    assert [(row["kind"], row["turn"]) for row in rows] == [("step", 0), ("step", 1)] * 2 + [
        ("eval", 0),
        ("eval", 1),
    ] * 2
    last = rows[1]
    assert (last["update"], last["fate"], last["num_turns"], last["reward"], last["turn_reward"]) == (
        1,
        "trained",
        2,
        1.0,
        1.0,
    )
    assert (last["success"], last["judged_by"]) == (True, "reward above 0")
    assert (last["prompt_ids"], last["completion_ids"], last["logprobs"]) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert (last["turn_advantage"], rows[5]["turn_advantage"]) == (-0.5, None)
    assert json.loads(last["messages"]) == played().steps[1].chat_completions
    assert json.loads(last["task"]) == {"question": "What is 2+3?"}


def test_folder_without_trajectories_or_not_writable_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(tmp_path), "--parquet", str(tmp_path / "table.parquet")]) == 2
    assert "has kept no trajectories" in capsys.readouterr().err
    group = TrajectoryGroup(group_id="00000000", task={}, trajectories=(played(),))
    TrajectoryLog(tmp_path, 10).record_evaluation(0, [group])
    assert export([str(tmp_path), "--parquet", str(tmp_path / "missing" / "table.parquet")]) == 2
    assert "missing" in capsys.readouterr().err
    assert export_parquet(tmp_path, tmp_path / "table.parquet") == 2


def test_person_plays_an_episode_from_the_keyboard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{guess}\n\n" for guess in (1, 2, 3, 4))))
    assert play.main(["recipe=guess"]) == 0
    said = capsys.readouterr().out
    assert "--- user" in said and "Higher." in said and "reward 0, 4 turns" in said
    assert "turn 3: reward 0" in said


def test_served_model_plays_with_the_settings_of_its_sampling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Server(ScriptedSampler):
        def __init__(self, base_url: str, model: str, chat_template_kwargs: dict[str, Any]) -> None:
            super().__init__(lambda messages: "1")
            asked.append((base_url, model, chat_template_kwargs))

        async def sample(self, request: SampleRequest) -> Completion:
            asked.append(request.params.temperature)
            return await super().sample(request)

    monkeypatch.setattr(play, "OpenAISampler", Server)
    settings = ["rollout.temperature=0", "rollout.max_steps=1", "model.chat_template_kwargs={think: false}"]
    assert play.main(["recipe=guess", *settings, "--base-url", "http://there/v1"]) == 0
    assert asked == [("http://there/v1", "policy", {"think": False}), 0.0]
    assert "1 turn, ended by max_steps" in capsys.readouterr().out


@pytest.mark.slow
def test_episode_lacking_its_parts_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for arguments, sentence in (
        (["recipe=guess"], "No answer was typed"),
        (["recipe=guess", "--task", "-1"], "--task -1: the training set has the tasks 0 to"),
        ([], "No workload: choose a recipe"),
        (["recipe=guess", "--base-url", "nowhere"], "is no web address"),
        (["recipe=guess", "learner.optimizer.lr=5"], "learner.optimizer.lr has no effect on launch.play"),
        (["recipe=guess", "rollout.temperature=0"], "A served model has it: add --base-url."),
        (["recipe=guess", "rollout.max_steps=-3"], "rollout.max_steps=-3"),
    ):
        assert play.main(arguments) == 2
        assert sentence in capsys.readouterr().err
