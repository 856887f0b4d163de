"""A run that meets a task that always fails: it goes on without it, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.rollouts.rollout import RolloutRequest
from environments.base import SingleTurnEnvironment
from environments.data.datasets import Dataset
from environments.errors import EnvironmentFailure
from environments.types import TerminationReason, Trajectory, TrajectoryGroup
from launch.settings.tree import TrainConfig
from launch.training.rollouts import Rollouts, RolloutSource
from launch.training.run_state import RunState
from launch.training.task_plan import TaskPlan
from launch.workload import Workload
from policies.agents.game import GameAgent

TASKS = Dataset([{"number": number} for number in range(6)])
ERROR = "EnvironmentFailure: The environment raised in Shop.reset: OSError: no shop"


class PlayedAtOnce:
    """A stream whose requests are played when their group is taken; tasks of ``broken`` fail."""

    def __init__(self, broken: set[int]) -> None:
        self._broken = broken
        self._groups: dict[str, list[RolloutRequest]] = {}

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        assert not finished
        for request in requests:
            self._groups.setdefault(request.group_id, []).append(request)

    def take(self, *group_ids: str) -> TrajectoryGroup:
        group_id = group_ids[0]
        members = tuple(self._played(request) for request in self._groups.pop(group_id))
        return TrajectoryGroup(group_id=group_id, task=members[0].task, trajectories=members)

    def _played(self, request: RolloutRequest) -> Trajectory:
        fails = request.task["number"] in self._broken
        return Trajectory(
            task=request.task,
            rollout_id=request.rollout_id,
            termination_reason=TerminationReason.ENV_ERROR if fails else TerminationReason.ENV_DONE,
            error=ERROR if fails else None,
        )


def begun(
    folder: Path, broken: set[int], said: list[str], tasks: Dataset = TASKS, before: RunState | None = None
) -> tuple[Rollouts, TaskPlan, RunState]:
    """A run on ``tasks``, which goes on from the progress of ``before``."""
    config = TrainConfig()
    config.rollout.groups_per_step = 2
    state = RunState(config, folder)
    if before is not None:
        state.progress = before.progress
    workload = Workload(agent_class=GameAgent, env_class=SingleTurnEnvironment, train_dataset=tasks)
    plan = TaskPlan(config, workload, False, state, cast(Any, SimpleNamespace(announce=said.append)))
    source = cast(RolloutSource, PlayedAtOnce(broken))
    rollouts = Rollouts(source, plan, config.rollout, state.progress, num_updates=1000)
    rollouts.begin(plan.still_wanted(state.saved_stream()))
    return rollouts, plan, state


def take_groups(rollouts: Rollouts, count: int) -> list[int]:
    taken = []
    for _ in range(count):
        taken.append(rollouts.take().task["number"])
        rollouts.commit()
    return taken


def test_broken_task_is_met_once_and_then_no_more(tmp_path: Path) -> None:
    said: list[str] = []
    rollouts, plan, state = begun(tmp_path, {4}, said)
    taken = take_groups(rollouts, 60)
    assert taken.count(4) == 1
    assert set(taken) == set(range(6))
    assert list(state.progress.set_aside) == ["4"]
    plan.announce_set_aside()
    assert "Task 4 is set aside" in said[0] and "no shop" in said[0]
    assert "1 of 6 tasks failed everywhere" in said[-1] and "set_aside_tasks.jsonl" in said[-1]


def test_new_tasks_are_played_whatever_was_set_aside_before(tmp_path: Path) -> None:
    said: list[str] = []
    rollouts, _, state = begun(tmp_path, {4}, said)
    take_groups(rollouts, 60)
    repaired = Dataset([{"number": number} for number in (0, 1, 2, 3, 7, 5)])
    rollouts, _, _ = begun(tmp_path, set(), said, repaired, before=state)
    assert set(take_groups(rollouts, 60)) == {0, 1, 2, 3, 7, 5}
    assert said[-1] == "1 of the old tasks were set aside. All of the new ones are played."


def test_nothing_is_said_of_tasks_where_all_can_be_played(tmp_path: Path) -> None:
    said: list[str] = []
    rollouts, plan, _ = begun(tmp_path, set(), said)
    take_groups(rollouts, 12)
    plan.announce_set_aside()
    assert said == []


def test_environment_that_never_works_ends_run_with_its_error(tmp_path: Path) -> None:
    rollouts, _, _ = begun(tmp_path, set(range(6)), [])
    with pytest.raises(EnvironmentFailure, match=r"times OSError in Shop.reset"):
        take_groups(rollouts, 60)
