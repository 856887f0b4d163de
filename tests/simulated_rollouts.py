"""Rollouts that take seconds of a clock of their own: for tests and benchmarks of ``Rollouts``."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from actors.rollouts.rollout import RolloutRequest
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from launch.run_folder.checkpoint import Progress, StreamState
from launch.settings.tree import RolloutConfig
from launch.training.rollout_requests import group_name
from launch.training.rollouts import Rollouts
from launch.training.task_plan import TaskPlan

LONGEST = 60.0
"""Times the median, at which a rollout is given up."""


@dataclass(frozen=True)
class SimulatedPlan:
    """Requests of groups without tasks, none of which fails."""

    group_size: int

    def requests(self, number: int, version: int) -> list[RolloutRequest]:
        name = group_name(number)
        return [
            RolloutRequest(rollout_id=f"{name}/{member:04d}", group_id=name, task={}, min_version=version)
            for member in range(self.group_size)
        ]

    def record_failures(self, group: TrajectoryGroup, num_requested: int) -> None: ...

    def record_results(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        return {}

    def still_wanted(self, saved: StreamState) -> StreamState:
        return saved

    def announce_set_aside(self) -> None: ...


@dataclass
class SimulatedStream:
    """Plays requests in their order, each on the first of its actors that is free; ``take`` moves the clock.

    Each rollout is sampled by the oldest version that it allows.
    """

    num_actors: int
    duration: Callable[[str], float]
    """Seconds of a rollout, by its id."""
    seconds: float = 0.0
    num_sent: int = 0
    """Rollouts that were sent to the actors."""
    _free: list[float] = field(init=False)
    _groups: dict[str, dict[str, tuple[float, Trajectory]]] = field(default_factory=dict)
    """Of each group: when each of its rollouts has ended, and what it is then."""

    def __post_init__(self) -> None:
        self._free = [self.seconds] * self.num_actors

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        there = {trajectory.rollout_id: trajectory for trajectory in finished}
        for request in requests:
            played = there.get(request.rollout_id)
            group = self._groups.setdefault(request.group_id, {})
            group[request.rollout_id] = self._play(request) if played is None else (self.seconds, played)

    def _play(self, request: RolloutRequest) -> tuple[float, Trajectory]:
        self.num_sent += 1
        actor = self._free.index(min(self._free))
        end = max(self._free[actor], self.seconds) + self.duration(request.rollout_id)
        self._free[actor] = end
        completion = Completion(text="", finish_reason="stop", policy_version=request.min_version)
        return end, Trajectory(rollout_id=request.rollout_id, steps=[Step(completion=completion)])

    def end(self, group_id: str) -> float:
        """When the group is complete."""
        return max(end for end, _ in self._groups[group_id].values())

    def take(self, *group_ids: str) -> TrajectoryGroup:
        complete = [each for each in group_ids if self.end(each) <= self.seconds]
        group_id = complete[0] if complete else min(group_ids, key=self.end)
        self.seconds = max(self.seconds, self.end(group_id))
        members = tuple(each for _, each in self._groups.pop(group_id).values())
        return TrajectoryGroup(group_id=group_id, task={}, trajectories=members)

    def complete(self) -> set[str]:
        """The groups that could be taken without a wait."""
        return {group_id for group_id in self._groups if self.end(group_id) <= self.seconds}

    def oldest_allowed(self) -> dict[str, int]:
        """The groups that were requested and not taken, and the oldest version that samples for each."""
        return {
            group_id: min(each.completions[0].policy_version for _, each in group.values())
            for group_id, group in self._groups.items()
        }

    def num_groups(self) -> int:
        """Groups that were requested and not taken."""
        return len(self._groups)

    def finished(self) -> list[Trajectory]:
        played = (each for group in self._groups.values() for each in group.values())
        return [trajectory for end, trajectory in played if end <= self.seconds]


def log_normal(seed: int, sigma: float, rollout_id: str) -> float:
    """Seconds of a rollout: 1 in the median, with a tail that is the longer the larger ``sigma`` is."""
    rng = random.Random(f"{seed}/{rollout_id}")
    return min(LONGEST, math.exp(rng.gauss(0.0, sigma)))


@dataclass(frozen=True)
class SimulatedRun:
    """A run whose rollouts take 1 s in the median, log-normally distributed, and whose updates take 1 s."""

    max_staleness: int
    sigma: float = 1.5
    replaced_share: float = 0.0
    """Share of the groups that are dropped and replaced."""
    num_actors: int = 96
    num_updates: int = 60
    groups_per_step: int = 8
    group_size: int = 8
    seed: int = 0

    def play(self, group_order: str) -> tuple[float, float]:
        """Its seconds with the groups in this order, and the mean staleness of the groups."""
        rollout = RolloutConfig(
            groups_per_step=self.groups_per_step, max_staleness=self.max_staleness, group_order=group_order
        )
        stream = SimulatedStream(self.num_actors, partial(log_normal, self.seed, self.sigma))
        plan = cast(TaskPlan, SimulatedPlan(self.group_size))
        progress = Progress()
        rollouts = Rollouts(stream, plan, rollout, progress, self.num_updates)
        rollouts.begin(StreamState())
        staleness = []
        for version in range(self.num_updates):
            num_selected = 0
            while num_selected < self.groups_per_step:
                group = rollouts.take()
                if random.Random(f"{self.seed}/{group.group_id}").random() < self.replaced_share:
                    rollouts.replace(num_selected)
                else:
                    num_selected += 1
                    staleness.append(version - group.trajectories[0].completions[0].policy_version)
            stream.seconds += 1.0
            progress.step = progress.version = version + 1
            rollouts.commit()
        return stream.seconds, statistics.mean(staleness)
