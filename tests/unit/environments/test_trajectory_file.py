"""The file that keeps the results of an evaluation."""

from __future__ import annotations

import datetime
import json
import multiprocessing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from played_trajectories import written

from environments.data.trajectory_file import TrajectoryFile, read_trajectories
from environments.data.trajectory_json import trajectory_from_json
from environments.errors import ConfigError, DatasetError
from environments.types import Completion, Step, TerminationReason, Trajectory

EVALUATION = {"agent": "GameAgent", "sampling": {"temperature": 0.6}}
TASKS = [{"question": "a"}, {"question": "b"}, {"question": "c"}]


def trajectory(index: int, reason: TerminationReason = TerminationReason.ENV_DONE) -> Trajectory:
    completion = Completion(
        prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-0.5,), text="x", finish_reason="stop"
    )
    step = Step(action="x", reward=0.5, done=True, info={"n": index}, completion=completion)
    return Trajectory(
        task=TASKS[index],
        steps=[step],
        reward=0.5,
        rollout_id=f"{index}/0",
        termination_reason=reason,
        metrics={"called": 1.0},
    )


def open_file(path: Path, evaluation: dict[str, Any] = EVALUATION, tasks: Any = TASKS) -> TrajectoryFile:
    return TrajectoryFile(path, evaluation, tasks)


def test_what_was_written_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    with open_file(tmp_path / "a" / "results.jsonl") as file:
        assert file.finished == {}
        file.append(2, trajectory(2))
        file.append(0, trajectory(0, TerminationReason.AGENT_ERROR))
    with open_file(tmp_path / "a" / "results.jsonl") as file:
        assert file.finished == {2: trajectory(2), 0: trajectory(0, TerminationReason.AGENT_ERROR)}


def test_trajectories_are_read_in_order_and_the_last_one_counts(tmp_path: Path) -> None:
    with open_file(tmp_path / "results") as file:
        file.append(1, trajectory(1))
        file.append(0, trajectory(0, TerminationReason.CRASHED))
        file.append(0, trajectory(0))
    assert read_trajectories(tmp_path / "results") == [trajectory(0), trajectory(1)]


@pytest.mark.parametrize(
    "name", ["reward", "rollout_id", "steps", "task", "termination_reason", "metrics", "is_correct"]
)
def test_trajectory_without_a_field_is_refused(name: str) -> None:
    values = written(trajectory(0))
    del values[name]
    with pytest.raises(KeyError, match=name):
        trajectory_from_json(values)


def test_turns_that_are_no_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    open_file(path).close()
    turn_by_turn = json.dumps({"index": 0} | asdict(trajectory(0)))
    path.write_text(path.read_text() + turn_by_turn + "\n")
    with pytest.raises(DatasetError, match=r"results.jsonl is no trajectory .*: name another file"):
        read_trajectories(path)


@pytest.mark.parametrize("reason", [each for each in TerminationReason if each.is_infrastructure])
def test_rollouts_spoilt_by_infrastructure_are_played_again(
    tmp_path: Path, reason: TerminationReason
) -> None:
    with open_file(tmp_path / "results") as file:
        file.append(0, trajectory(0, reason))
    with open_file(tmp_path / "results") as file:
        assert file.finished == {}


def test_line_cut_within_a_character_is_no_result_yet(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with open_file(path) as file:
        file.append(0, trajectory(0))
        file.append(1, Trajectory(task=TASKS[1], steps=[Step(observation="ä")]))
    path.write_bytes(path.read_bytes().partition("ä".encode()[1:])[0])
    assert len(read_trajectories(path)) == 1
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(DatasetError, match="line 3 is no JSON"):
        read_trajectories(path)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_line_that_was_cut_off_is_dropped_and_the_others_stay(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results"
    with open_file(path) as file:
        file.append(0, trajectory(0))
        file.append(1, trajectory(1))
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(read_trajectories(path)) == (
        2 if cut == 1 else 1
    )  # a line without its end is read if it is whole
    with open_file(path) as file:
        assert list(file.finished) == [0]
        file.append(1, trajectory(1))
    assert len(read_trajectories(path)) == 2


def test_file_of_which_only_beginning_was_written_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "results").write_text('{"evaluat')
    with open_file(tmp_path / "results") as file:
        file.append(0, trajectory(0))
    assert read_trajectories(tmp_path / "results") == [trajectory(0)]


def test_results_of_another_evaluation_are_not_mixed_in(tmp_path: Path) -> None:
    open_file(tmp_path / "results").close()
    other = EVALUATION | {"sampling": {"temperature": 1.0}}
    with pytest.raises(ConfigError, match=r"sampling=\{'temperature': 0.6\}.*'temperature': 1.0"):
        open_file(tmp_path / "results", other)


@pytest.mark.parametrize("tasks", [TASKS[1:], TASKS[:0]])
def test_results_of_other_tasks_are_refused(tmp_path: Path, tasks: Any) -> None:
    with open_file(tmp_path / "results") as file:
        file.append(0, trajectory(0))
    with pytest.raises(ConfigError, match="other tasks"):
        open_file(tmp_path / "results", tasks=tasks)


def test_tasks_and_settings_with_nan_are_equal_when_reopened(tmp_path: Path) -> None:
    tasks = [{"question": "a", "scores": [1.0, float("nan")]}, {"question": "b", "score": float("nan")}]
    evaluation = EVALUATION | {"env_args": {"bound": float("nan"), "size": 1}}
    with open_file(tmp_path / "results", evaluation, tasks) as file:
        for index, task in enumerate(tasks):
            file.append(index, Trajectory(task=task, termination_reason=TerminationReason.ENV_DONE))
    with open_file(tmp_path / "results", evaluation, tasks) as file:
        assert list(file.finished) == [0, 1]
    with pytest.raises(ConfigError, match="env_args"):
        open_file(tmp_path / "results", EVALUATION | {"env_args": {"bound": float("nan"), "size": 2}}, tasks)


@pytest.mark.parametrize("content", ["no JSON\n", "[1]\n", '{"evaluation": 1}\n'])
def test_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "results").write_text(content)
    with pytest.raises(DatasetError, match="results"):
        open_file(tmp_path / "results")
    assert (tmp_path / "results").read_text() == content


def test_line_that_is_no_trajectory_is_refused(tmp_path: Path) -> None:
    open_file(tmp_path / "results").close()
    with (tmp_path / "results").open("a") as file:
        file.write(json.dumps({"index": 0, "steps": [{"nonsense": 1}]}) + "\n")
    with pytest.raises(DatasetError, match="no trajectory"):
        open_file(tmp_path / "results")


def _hold(path: Path, held: Any, end: Any) -> None:
    with open_file(path):
        held.set()
        end.wait(120)


def test_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, end = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "results", held, end))
    process.start()
    assert held.wait(120)
    with pytest.raises(ConfigError, match="Another process"):
        open_file(tmp_path / "results")
    end.set()
    process.join()
    open_file(tmp_path / "results").close()


def test_what_json_does_not_know_becomes_its_text(tmp_path: Path) -> None:
    moment = datetime.date(2026, 1, 2)
    odd = trajectory(0)
    odd.steps[0].info["day"] = moment
    with open_file(tmp_path / "results") as file:
        file.append(0, odd)
    assert read_trajectories(tmp_path / "results")[0].steps[0].info["day"] == "2026-01-02"


@pytest.mark.parametrize(
    "content", ['{"a": 1}', '{"evaluations": ', "text\nwithout an end", '{"evaluation": 1}\nx']
)
def test_another_file_loses_nothing_of_what_it_holds(tmp_path: Path, content: str) -> None:
    (tmp_path / "results").write_text(content)
    if content.startswith('{"evaluation": '):
        content = content.removesuffix("x")  # ours by its beginning: only the cut line goes
    with pytest.raises(DatasetError, match="no trajectory file"):
        open_file(tmp_path / "results")
    assert (tmp_path / "results").read_text() == content


def test_keys_that_json_does_not_know_become_texts(tmp_path: Path) -> None:
    grid = trajectory(0)
    grid.steps[0].info["map"] = {(0, 1): "wall"}
    with open_file(tmp_path / "results") as file:
        file.append(0, grid)
    assert read_trajectories(tmp_path / "results")[0].steps[0].info["map"] == {"(0, 1)": "wall"}


@dataclass
class AnnotatedStep(Step):
    note: str = "mine"


def test_step_of_a_users_own_class_is_read_as_a_step(tmp_path: Path) -> None:
    own = trajectory(0)
    own.steps = [AnnotatedStep(action="x", note="more")]
    with open_file(tmp_path / "results") as file:
        file.append(0, own)
    assert read_trajectories(tmp_path / "results")[0].steps == [Step(action="x")]


def test_judgement_of_a_reward_function_is_read_again(tmp_path: Path) -> None:
    judged = trajectory(0)
    judged.is_correct, judged.by_reward_function = False, True
    with open_file(tmp_path / "results") as file:
        file.append(0, judged)
    assert read_trajectories(tmp_path / "results") == [judged]
