"""The trackers of ``run.trackers``: made by their names, and called so that none can stop the run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from environments.errors import ConfigError
from environments.limited_call import CallThread
from environments.named_module import call_own, load_class
from environments.types import TrajectoryGroup
from launch.reporting.trackers.base import BaseTracker, TrackedRun
from launch.run_folder.jsonl_log import JsonlLog

T = TypeVar("T")

TRACKERS = {
    "tensorboard": "launch.reporting.trackers.adapters:TensorBoard",
    "wandb": "launch.reporting.trackers.adapters:WandB",
    "mlflow": "launch.reporting.trackers.adapters:MLflow",
    "trackio": "launch.reporting.trackers.adapters:Trackio",
}
CALL_SECONDS = 60.0
"""Seconds that a call of a tracker may take, which holds up the run meanwhile."""
TRACKED = "tracked.jsonl"
"""File with the run's id for trackers, and the steps that each was given."""


def chosen_trackers(names: Sequence[str]) -> dict[str, BaseTracker]:
    """The trackers that ``run.trackers`` lists.

    Raises:
        ConfigError: one is unknown, listed twice or cannot be made, or its package is not installed.
    """
    chosen: dict[str, BaseTracker] = {}
    for name in names:
        if name in chosen:
            raise ConfigError(f"run.trackers={list(names)} has {name!r} twice: name it once.")
        tracker_class = load_class("run.trackers", name, TRACKERS, BaseTracker)
        package = tracker_class.package
        if package is not None and not _is_installed(package):
            raise ConfigError(
                f"run.trackers has {name!r}, and its package is not installed here: run "
                f"`pip install {package}`, or leave {name} out."
            )
        chosen[name] = call_own(f"run.trackers={name!r}", tracker_class)
    return chosen


def _is_installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # else it is a folder of that name, as wandb makes


class Trackers:
    """Chosen trackers of a run. One that raises or hangs is announced, and not called again.

    No tracker is given a step twice that cannot forget it: ``tracked.jsonl`` has what each was given, also
    after the checkpoint from which a resumed run goes on.

    Args:
        chosen: by their names.
        folder: of the run.
        last_step: the step from which the run goes on; with 0 it has a new id.
        announce: prints a line.
    """

    def __init__(
        self, chosen: Mapping[str, BaseTracker], folder: Path, last_step: int, announce: Callable[[str], None]
    ) -> None:
        self._active, self._announce = dict(chosen), announce
        # Not those that end before this process leaves Ray: a tracker is closed after that.
        self._threads = {name: CallThread(f"tracker {name}") for name in chosen}
        self._folder, self._last_step = folder, last_step
        self._file = JsonlLog(folder / TRACKED, sys.maxsize if last_step else -1)
        self._given: set[tuple[str, int, str]] = set()
        self._run_id = ""
        for record in self._file.kept:
            self._run_id = record.get("run_id", self._run_id)
            self._given.update((name, record["step"], record["kind"]) for name in record.get("trackers", ()))
        self._failures: dict[str, str] = {}

    def open(self, settings: Mapping[str, Any]) -> None:
        """Open all of them. Nothing is logged before that."""
        if not self._run_id:
            self._run_id = uuid.uuid4().hex[:12]
            self._file.append({"step": 0, "run_id": self._run_id})
        run = TrackedRun(
            folder=self._folder, run_id=self._run_id, last_step=self._last_step, settings=settings
        )
        for name in list(self._active):
            self._call(name, lambda tracker: tracker.open(run), None)

    def measure(
        self, kind: str, step: int, groups: Sequence[TrajectoryGroup], taken: Collection[str]
    ) -> dict[str, float]:
        """Numbers of the trackers' own, by the names ``kind/NAME``.

        Args:
            kind: "rollout" for an update, "eval" for an evaluation.
            taken: names that the record has already.
        """
        numbers: dict[str, float] = {}

        def measured(tracker: BaseTracker) -> dict[str, float]:
            own = {f"{kind}/{name}": float(value) for name, value in tracker.measure(step, groups).items()}
            if twice := sorted(own.keys() & {*taken, *numbers}):
                raise ValueError(f"measure() returned {twice[0]}, which the run has already: rename it")
            return own

        for name in list(self._active):
            numbers |= self._call(name, measured, dict[str, float]())
        return numbers

    def log(
        self, kind: str, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        """Give a record to all of them that were not given it before."""
        names = [
            name
            for name, tracker in self._active.items()
            if tracker.forgets_later_steps or (name, step, kind) not in self._given
        ]
        # First: what a run that is killed here has not logged is missed there, and not logged twice.
        self._file.append({"step": step, "kind": kind, "trackers": names})
        for name in names:
            self._call(name, lambda tracker: tracker.log(step, metrics, histograms), None)

    def close(self) -> None:
        """Close those that have not failed, and announce once more which ones have."""
        for name in list(self._active):
            self._call(name, lambda tracker: tracker.close(), None, is_last=True)
        for thread in self._threads.values():
            thread.end()
        for text in self._failures.values():
            self._announce(text)

    def _call(self, name: str, work: Callable[[BaseTracker], T], otherwise: T, is_last: bool = False) -> T:
        """Return what ``work`` returns, ``otherwise`` if it raises."""
        try:
            answer = self._threads[name].begin(partial(work, self._active[name]))
            wait([answer], CALL_SECONDS)
            if not answer.done():
                raise TimeoutError(f"it has not answered for {CALL_SECONDS:g} s")
            return answer.result()
        except Exception as error:  # noqa: BLE001  # whatever a tracker raises, the run goes on
            del self._active[name]
            reason = " ".join(str(error).split()).removesuffix(".")
            self._failures[name] = (
                f"The tracker {name} has failed, and lacks what came after: {type(error).__name__}: {reason}."
            )
            if not is_last:  # else it is among the last lines at once
                self._announce(f"{self._failures[name]} The run goes on without it.")
            return otherwise
