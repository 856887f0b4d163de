"""Trajectories that a run keeps: whole, once, linear in their length, and no more of them than was asked."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played_trajectories import written

from environments.data.trajectory_json import trajectory_from_json
from environments.errors import TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.run_folder.trajectory_log import (
    EVALUATION,
    FOLDER,
    TRAIN,
    TrajectoryLog,
    find_task,
    kept_steps,
    read_kept,
)
from launch.training.stages.policy_update import turn_advantages
from policies.learning.samples import TrainBatch, TrainingSample


def conversation(rollout_id: str, num_turns: int, rewrites: bool = False, size: int = 20) -> Trajectory:
    """Each prompt is the whole conversation before it; with ``rewrites`` the second turn begins anew."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
    ids: tuple[int, ...] = (1, 2, 3)
    steps = []
    for turn in range(num_turns):
        if rewrites and turn == 1:
            messages, ids = [{"role": "user", "content": "Again?"}], (9, 2)
        said = tuple(range(1000 * turn, 1000 * turn + size))
        messages = [*messages, {"role": "assistant", "content": f"answer {turn} " * (size // 2)}]
        completion = Completion(
            prompt_ids=ids,
            completion_ids=said,
            logprobs=tuple(-0.1 * number for number in range(size)),
            text=f"answer {turn} " * (size // 2),
            finish_reason="stop",
            policy_version=turn,
            token_versions=(turn,) * size,
        )
        steps.append(
            Step(chat_completions=messages, model_response="x", reward=turn / 7, completion=completion)
        )
        messages = [*messages, {"role": "user", "content": f"observation {turn} " * (size // 4)}]
        ids = (*ids, *said, *range(size))
    return Trajectory(
        task={"question": "How many?"},
        steps=steps,
        reward=0.5,
        rollout_id=rollout_id,
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"called": 1.0},
    )


def group(number: int, *trajectories: Trajectory, baseline: Trajectory | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=f"{number:08d}", task={}, trajectories=trajectories, baseline=baseline)


@pytest.mark.parametrize("rewrites", [False, True])
def test_trajectory_comes_back_whole_with_its_advantages(tmp_path: Path, rewrites: bool) -> None:
    first, second = conversation("00000000/0000", 5, rewrites), conversation("00000000/0001", 1)
    greedy, dropped = conversation("00000000/greedy", 2), conversation("00000001/0000", 3)
    failed = Trajectory(
        rollout_id="00000001/0001", termination_reason=TerminationReason.CRASHED, error="gone"
    )
    log = TrajectoryLog(tmp_path, 9)
    advantages = {"00000000/0000": [0.5, -0.25]}
    unused = {"zero_signal": [group(1, dropped, failed)], "stale": []}
    log.record_update(1, [group(0, first, second, baseline=greedy)], unused, advantages)

    kept = read_kept(tmp_path, TRAIN, 1)
    assert [each.trajectory for each in kept] == [first, second, greedy, dropped, failed]
    assert [each.outcome for each in kept] == ["trained", "trained", "baseline", "zero_signal", "zero_signal"]
    assert [each.advantages for each in kept] == [(0.5, -0.25), (), (), (), ()]
    assert [each.group_id for each in kept] == ["00000000"] * 3 + ["00000001"] * 2


def test_line_grows_with_conversation_and_not_with_its_square(tmp_path: Path) -> None:
    sizes = []
    for num_turns in (10, 20, 40):
        TrajectoryLog(tmp_path, 1).record_evaluation(0, [group(0, conversation("0/0", num_turns))])
        sizes.append((tmp_path / FOLDER / "eval_000000.jsonl").stat().st_size)
    assert sizes[2] - sizes[1] < 2.1 * (sizes[1] - sizes[0])


@pytest.mark.slow
def test_update_of_long_conversations_costs_half_a_second(tmp_path: Path) -> None:
    groups = [
        group(number, *(conversation(f"{number}/{n}", 20, size=100) for n in range(8))) for number in range(8)
    ]
    log, seconds = TrajectoryLog(tmp_path, 1), []
    for step in range(1, 4):
        start = time.process_time()
        log.record_update(step, groups, {}, {})
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5, seconds
    assert [each.trajectory for each in read_kept(tmp_path, TRAIN, 3)] == [
        each for every in groups for each in every.trajectories
    ]


def test_messages_equal_in_python_keep_their_types_and_order() -> None:
    array = np.zeros(2)
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": 1, "name": "a"}, {"role": "user", "image": array}],
        [{"role": "user", "content": True, "name": "a"}, {"role": "user", "image": array}],
        [{"name": "a", "role": "user", "content": True}, {"role": "user", "image": array}, {"role": "tool"}],
    ]
    line = json.dumps(written(Trajectory(steps=[Step(chat_completions=each) for each in turns])))
    read = [step.chat_completions for step in trajectory_from_json(json.loads(line)).steps]
    assert json.dumps(read) == json.dumps(turns, default=str)


def test_prompt_with_an_old_beginning_and_a_new_end_comes_back() -> None:
    steps = [
        Step(completion=Completion(prompt_ids=prompt, completion_ids=(7, 8), text="", finish_reason="stop"))
        for prompt in [(1, 2, 3), (1, 2, 3, 7, 8, 4), (1, 2, 3, 7), (1, 2, 9), (), (1, 2, 9, 7, 8), (5,)]
    ]
    steps.insert(4, Step())
    values = written(Trajectory(steps=steps))
    tokens = values["steps"]["completion"]["tokens"]
    assert (tokens["parents"], tokens["starts"]) == ([-1, 0, 0, -1, -1], [0, 4, 2, 0, 0])
    assert trajectory_from_json(values) == Trajectory(steps=steps)


@pytest.mark.parametrize("text", ["é\u2028\x85\n", "half of a character: \ud83d", '"task":{"q":1}'])
def test_any_text_and_number_is_read_as_it_was(tmp_path: Path, text: str) -> None:
    step = Step(chat_completions=[{"role": "user", "content": text}], reward=float("inf"), mc_return=1e-310)
    trajectory = Trajectory(task={"question": text}, steps=[step], reward=float("-inf"))
    failed = replace(trajectory, error="half of a character: \udc80")
    TrajectoryLog(tmp_path, 1).record_evaluation(0, [group(0, trajectory, failed)])
    assert [each.trajectory for each in read_kept(tmp_path, EVALUATION, 0)] == [trajectory, failed]
    old = json.dumps({"fate": "trained", "advantages": []} | written(trajectory))
    (tmp_path / FOLDER / "step_000001.jsonl").write_text(old + "\n")
    found = find_task(tmp_path, {"question": text})
    assert [(each["kind"], each["row"]) for each in found] == [("eval", 0), ("eval", 1), ("step", 0)]


def test_update_done_again_replaces_its_file(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, 2)
    for step in (1, 2, 3, 3):
        log.record_update(step, [group(0, conversation("0/0", 1))], {}, {})
        log.record_evaluation(step, [group(0, conversation("0/0", 1))])
    assert kept_steps(tmp_path, TRAIN) == kept_steps(tmp_path, EVALUATION) == [2, 3]
    assert len(read_kept(tmp_path, TRAIN, 3)) == 1
    assert not list((tmp_path / FOLDER).glob(".*")), "no temporary file is left"


def test_repeated_steps_of_a_resumed_run_are_forgotten(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, 2)
    for step in (19, 20):
        log.record_update(step, [group(0, conversation("0/0", 1))], {}, {})
        log.record_evaluation(step, [group(0, conversation("0/0", 1))])
    log = TrajectoryLog(tmp_path, 2)
    log.forget_after(19)
    assert kept_steps(tmp_path, TRAIN) == kept_steps(tmp_path, EVALUATION) == [19]
    log.forget_after(10)
    for step in (11, 12):
        log.record_update(step, [group(0, conversation("0/0", 1))], {}, {})
    assert kept_steps(tmp_path, TRAIN) == [11, 12]


def test_run_that_is_to_keep_none_writes_none(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path, 0).record_evaluation(0, [group(0, conversation("0/0", 1))])
    assert not (tmp_path / FOLDER).exists() and kept_steps(tmp_path, EVALUATION) == []


def test_file_missing_or_unreadable_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TroupeError, match=r"step_000007.*run\.trajectories_kept"):
        read_kept(tmp_path, TRAIN, 7)
    (tmp_path / FOLDER).mkdir()
    for text in ("nonsense\n", json.dumps({"fate": "trained"}) + "\n"):
        (tmp_path / FOLDER / "step_000007.jsonl").write_text(text)
        with pytest.raises(TroupeError, match="holds no trajectories"):
            read_kept(tmp_path, TRAIN, 7)


def test_turns_advantage_is_the_mean_over_its_tokens() -> None:
    sample = TrainingSample(
        sample_id="0/0#0",
        prompt_ids=(1,),
        response_ids=(1,) * 5,
        loss_mask=(1, 1, 0, 1, 1),
        rollout_logprobs=(0.0,) * 5,
        turns=(0, 0, -1, 1, 1),
        advantages=(1.0, 2.0, 0.0, -1.0, -1.0),
    )
    masked = TrainingSample(
        sample_id="0/1#0",
        prompt_ids=(1,),
        response_ids=(1,),
        loss_mask=(0,),
        rollout_logprobs=(0.0,),
        turns=(-1,),
    )
    assert turn_advantages([TrainBatch(samples=(sample, masked))]) == {"0/0": [1.5, -1.0]}
