"""Trajectories that a run keeps: whole, once, linear in their length, and no more of them than was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from environments.errors import TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.run_folder.trajectory_log import (
    EVALUATION,
    FOLDER,
    TRAIN,
    TrajectoryLog,
    kept_steps,
    read_kept,
)
from launch.training.stages.reinforce import turn_advantages
from policies.learning.samples import TrainBatch, TrainingSample


def conversation(rollout_id: str, num_turns: int, rewrites: bool = False) -> Trajectory:
    """Each prompt is the whole conversation before it; with ``rewrites`` the second turn begins anew."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
    ids: tuple[int, ...] = (1, 2, 3)
    steps = []
    for turn in range(num_turns):
        if rewrites and turn == 1:
            messages, ids = [{"role": "user", "content": "Again?"}], (9, 2)
        said = (10 + turn,) * 20
        messages = [*messages, {"role": "assistant", "content": f"answer {turn} " * 10}]
        completion = Completion(
            prompt_ids=ids,
            completion_ids=said,
            logprobs=tuple(-0.1 * number for number in range(20)),
            text=f"answer {turn} " * 10,
            finish_reason="stop",
            policy_version=turn,
            token_versions=(turn,) * 20,
        )
        steps.append(
            Step(chat_completions=messages, model_response="x", reward=turn / 7, completion=completion)
        )
        messages = [*messages, {"role": "user", "content": f"observation {turn}"}]
        ids = (*ids, *said, 5)
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
def test_a_trajectory_comes_back_whole_with_its_fate_and_its_advantages(
    tmp_path: Path, rewrites: bool
) -> None:
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
    assert [each.fate for each in kept] == ["trained", "trained", "baseline", "zero_signal", "zero_signal"]
    assert [each.advantages for each in kept] == [(0.5, -0.25), (), (), (), ()]
    assert [each.group_id for each in kept] == ["00000000"] * 3 + ["00000001"] * 2


def test_a_line_grows_with_the_conversation_and_not_with_its_square(tmp_path: Path) -> None:
    sizes = []
    for num_turns in (10, 20, 40):
        TrajectoryLog(tmp_path, 1).record_evaluation(0, [group(0, conversation("0/0", num_turns))])
        sizes.append((tmp_path / FOLDER / "eval_000000.jsonl").stat().st_size)
    assert sizes[2] - sizes[1] < 2.1 * (sizes[1] - sizes[0])


def test_an_update_that_is_done_again_replaces_its_file_and_the_oldest_go(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, 2)
    for step in (1, 2, 3, 3):
        log.record_update(step, [group(0, conversation("0/0", 1))], {}, {})
        log.record_evaluation(step, [group(0, conversation("0/0", 1))])
    assert kept_steps(tmp_path, TRAIN) == kept_steps(tmp_path, EVALUATION) == [2, 3]
    assert len(read_kept(tmp_path, TRAIN, 3)) == 1
    assert not list((tmp_path / FOLDER).glob(".*")), "no temporary file is left"


def test_what_a_resumed_run_makes_again_is_forgotten_and_the_rest_stays(tmp_path: Path) -> None:
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


def test_a_run_that_is_to_keep_none_writes_none(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path, 0).record_evaluation(0, [group(0, conversation("0/0", 1))])
    assert not (tmp_path / FOLDER).exists() and kept_steps(tmp_path, EVALUATION) == []


def test_what_is_not_there_or_not_readable_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TroupeError, match=r"step_000007.*run\.trajectories_kept"):
        read_kept(tmp_path, TRAIN, 7)
    (tmp_path / FOLDER).mkdir()
    for text in ("nonsense\n", json.dumps({"fate": "trained"}) + "\n"):
        (tmp_path / FOLDER / "step_000007.jsonl").write_text(text)
        with pytest.raises(TroupeError, match="holds no trajectories"):
            read_kept(tmp_path, TRAIN, 7)


def test_a_turns_advantage_is_the_mean_over_its_tokens() -> None:
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
