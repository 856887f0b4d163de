"""Activity of a training loop, when anything last moved, and the wall time of each part of a step.

``launch.status`` and the watchdog read it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from launch.health.heartbeat import START_PHRASES

ACTIVITIES = {
    "time/wait": ("waits for rollouts", "rollouts"),
    "time/score": ("waits for the learner to score samples", "scores"),
    "time/credit": ("computes advantages", "advantages"),
    "time/learn": ("waits for the learner's update", "an update"),
    "time/publish": ("publishes weights", "a published version"),
    "time/evaluate": ("waits for an evaluation", "an evaluation"),
    "time/checkpoint": ("writes a checkpoint", "a checkpoint"),
    "time/rebuild": ("rebuilds the learner", "a rebuilt learner"),
}
"""Activities of the loop and their results, by the name under which ``Clock`` measures their time."""
STARTING = "starts"


class Activity:
    """The present activity of the training loop, and its beginning. Read by other threads."""

    def __init__(self) -> None:
        self._present = (STARTING, time.monotonic())
        self._ended: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The activity, as the end of a sentence about the loop."""
        return self._present[0]

    @property
    def since(self) -> float:
        """Time of its beginning, on the monotonic clock."""
        return self._present[1]

    def seconds_since_results(self) -> dict[str, float]:
        """Seconds since the loop last had each of the results, for those that it had."""
        now, ended = time.monotonic(), self._ended
        return {result: now - ended[name] for name, (_, result) in ACTIVITIES.items() if name in ended}

    def begin(self, phrase: str) -> None:
        """Enter the activity that ``phrase`` describes, such as "waits for room"."""
        if phrase != self.name:
            self._present = (phrase, time.monotonic())

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Enter the activity ``name`` of ``ACTIVITIES``, or the start of a part in ``START_PHRASES``, for the
        block, and return to the one before.
        """
        before = self.name
        self.begin(START_PHRASES[name] if name in START_PHRASES else ACTIVITIES[name][0])
        try:
            yield
            self._ended[name] = time.monotonic()
        finally:
            self.begin(before)


class Clock:
    """Measures seconds by name, from its making on.

    Args:
        activity: is entered for what is being measured.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._start

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those of ``name``."""
        start = time.monotonic()
        with self._activity.during(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
