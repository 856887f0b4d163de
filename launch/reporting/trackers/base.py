"""The protocol of a tracker: four methods, of which a class of one's own defines those that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as its trackers know it."""

    folder: Path
    run_id: str
    """Name of the run for programs outside: a resumed run has the one that it began with."""
    last_step: int
    """The step from which the run goes on; 0 for a run that begins."""
    settings: Mapping[str, Any]
    """All settings of the run, as in its ``settings.yaml``."""


class BaseTracker:
    """A place for a run's metrics, and a source of numbers of its own.

    A class of one's own is derived from this and chosen by ``run.trackers=[tensorboard,my_module:MyClass]``.
    It is made without arguments in the run's driver, and called in a thread of its own. Whatever it raises is
    announced, the tracker is not called again, and the run goes on; so, too, if a call takes a minute.
    """

    package: str | None = None
    """The package that this tracker imports when it is opened, by the name that pip knows."""
    forgets_later_steps: bool = False
    """True where ``open`` drops what was logged after ``last_step``. Other trackers are never given a step
    again that a resumed run repeats: they keep its first values."""

    def open(self, run: TrackedRun) -> None:
        """Begin, or go on with, the record of ``run``."""

    def measure(self, step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        """Return numbers of one's own about the groups of an update or of an evaluation.

        They are recorded with the others as ``rollout/NAME`` or ``eval/NAME``, by all trackers and in
        ``metrics.jsonl``, and ``run.stop_metric`` may name one of them.
        """
        return {}

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Record the metrics of an update, or of an evaluation, whose step may be one of before."""

    def close(self) -> None:
        """End the record: the run has ended, or is about to be resumed."""
