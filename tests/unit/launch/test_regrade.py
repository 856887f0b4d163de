"""Rewards of a past run's rollouts by another function: shown, and written for a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_late_rewards import group, played

from environments.errors import EnvironmentFailure, TroupeError
from environments.rewards.base import RewardOutput
from environments.types import Step, TerminationReason, Trajectory
from launch.recipes.regrade import changes, kept_groups, main, regraded_groups
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.training.recording import recorded_groups
from launch.training.selection import ZERO_SIGNAL


def answered(member: str, answer: str, reward: float) -> Trajectory:
    whole = played(member, reward)
    steps = [replace(each, action=[{"function": {"name": "f"}}]) for each in whole.steps[:1]]
    steps.append(replace(whole.steps[1], action=answer, model_response=answer))
    return replace(whole, steps=steps, is_correct=reward > 0)


def short(task_info: dict[str, Any], action: str) -> RewardOutput:
    if action == "unclear":
        raise EnvironmentFailure("The judge is out to lunch.")
    return RewardOutput(1 / len(action), is_correct=len(action) == 1)


@pytest.fixture
def past(tmp_path: Path) -> Path:
    """Two updates; one of them left out a group in which all had the same reward."""
    (tmp_path / "a").mkdir()
    log = TrajectoryLog(tmp_path / "a", 4)
    first = group(answered("00000000/0", "aa", 1.0), answered("00000000/1", "a", 0.0))
    alike = group(answered("00000001/2", "a", 1.0), answered("00000001/3", "aaaa", 1.0))
    last = group(answered("00000007/4", "a", 1.0), answered("00000007/5", "aaaaa", 0.0))
    log.record_update(1, [first], {ZERO_SIGNAL: [alike]}, {})
    log.record_update(2, [last], {}, {})
    return tmp_path / "a"


def test_new_rewards_are_shown_and_written(
    past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(past), str(tmp_path / "b"), "--reward", "test_regrade:short", "--groups-per-step", "1"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "4 of 6 rewards are others, and their mean is 0.6583 instead of 0.6667; "
        "1 rollouts became successes, 2 are none any more.\n"
        f"6 rollouts to 3 prompts. Learn from them by run.replay={tmp_path / 'b'} run.num_steps=3 "
        "rollout.groups_per_step=1 algorithm.correction.level=token: other weights have sampled them.\n"
    )
    written = [each for step in (1, 2, 3) for each in recorded_groups(tmp_path / "b", step)]
    assert [[each.reward for each in one.trajectories] for one in written] == [[0.5, 1], [1, 0.25], [1, 0.2]]
    assert [one.group_id for one in written] == ["00000000", "00000001", "00000002"]
    before = [each.completions for one in kept_groups(past) for each in one.trajectories]
    assert [each.completions for one in written for each in one.trajectories] == before
    assert main(command) == 2
    assert "has trajectories already: name another folder" in capsys.readouterr().err


def test_rollouts_without_a_reward_are_not_compared(past: Path) -> None:
    groups = kept_groups(past)
    failed = [replace(each, trajectories=tuple(map(spoilt, each.trajectories))) for each in groups]
    assert changes(groups, failed) == "No rollout has a reward before and now."
    assert changes(groups, groups).startswith("0 of 6 rewards are others")


def spoilt(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, termination_reason=TerminationReason.ENV_ERROR)


def test_missing_verdicts_and_rollouts_are_named(past: Path, tmp_path: Path) -> None:
    with pytest.raises(TroupeError, match="has kept no rollouts: name the folder"):
        kept_groups(tmp_path)
    (first, *_) = kept_groups(past)
    unclear = replace(first.trajectories[0], steps=[Step(action="unclear")])
    with pytest.raises(EnvironmentFailure, match="out to lunch"):
        regraded_groups([replace(first, trajectories=(unclear,))], short)
