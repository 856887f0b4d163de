"""A tracker as somebody outside of the library would write it: a class in a module of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.types import TrajectoryGroup
from launch.reporting.trackers.base import BaseTracker, TrackedRun


class OwnTracker(BaseTracker):
    """Keeps what it is given, and has a number of its own: the longest rollout of a group."""

    def __init__(self) -> None:
        self.runs: list[TrackedRun] = []
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.num_closed = 0

    def open(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def measure(self, step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        return {"longest": max(len(each.steps) for group in groups for each in group.trajectories)}

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        self.logged.append((step, metrics))

    def close(self) -> None:
        self.num_closed += 1
