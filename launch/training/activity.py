"""Activity of a training loop, and when anything last moved. ``launch.status`` and the watchdog read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from launch.health.heartbeat import START_PHRASES

PHRASES = {
    "time/wait": "waits for rollouts",
    "time/score": "waits for the learner to score samples",
    "time/credit": "computes advantages",
    "time/learn": "waits for the learner's update",
    "time/publish": "publishes weights",
    "time/evaluate": "waits for an evaluation",
    "time/checkpoint": "writes a checkpoint",
    "time/rebuild": "rebuilds the learner",
}
"""Activities of the loop, by the name under which ``Clock`` measures their time."""
RESULTS = {
    "time/wait": "rollouts",
    "time/score": "scores",
    "time/credit": "advantages",
    "time/learn": "an update",
    "time/publish": "a published version",
    "time/evaluate": "an evaluation",
    "time/checkpoint": "a checkpoint",
    "time/rebuild": "a rebuilt learner",
}
"""Results at the end of each activity."""
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
        """Seconds since the loop last had each of ``RESULTS``, for those that it had."""
        now = time.monotonic()
        return {RESULTS[name]: now - self._ended[name] for name in RESULTS if name in self._ended}

    def begin(self, phrase: str) -> None:
        """Enter the activity that ``phrase`` describes, such as "waits for room"."""
        if phrase != self.name:
            self._present = (phrase, time.monotonic())

    @contextmanager
    def during_start(self, part: str) -> Iterator[None]:
        """Enter the activity ``part`` of ``START_PHRASES`` for the block, and return to the one before."""
        before = self.name
        self.begin(START_PHRASES[part])
        try:
            yield
        finally:
            self.begin(before)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Enter the activity ``name`` of ``PHRASES`` for the block, and return to the one before."""
        before = self.name
        self._present = (PHRASES[name], time.monotonic())
        try:
            yield
            self._ended[name] = time.monotonic()
        finally:
            self._present = (before, time.monotonic())
