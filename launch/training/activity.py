"""What a training loop is doing, and when anything last moved. ``launch.status`` and the watchdog read it."""

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
"""What the loop does, by the name under which ``Clock`` measures its time."""
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
"""What there is at the end of it."""
STARTING = "starts"


class Activity:
    """The present activity of the training loop, and its beginning. Read by other threads."""

    def __init__(self) -> None:
        self._present = (STARTING, time.monotonic())
        self._ended: dict[str, float] = {}

    @property
    def name(self) -> str:
        """What the loop is doing, as the end of a sentence about it."""
        return self._present[0]

    @property
    def since(self) -> float:
        """When that began, on the monotonic clock."""
        return self._present[1]

    def seconds_since_results(self) -> dict[str, float]:
        """Seconds since the loop last had each of ``RESULTS``, for those that it had."""
        now = time.monotonic()
        return {RESULTS[name]: now - self._ended[name] for name in RESULTS if name in self._ended}

    def begin(self, phrase: str) -> None:
        """From now on the loop does what ``phrase`` says, such as "waits for room"."""
        if phrase != self.name:
            self._present = (phrase, time.monotonic())

    @contextmanager
    def during_start(self, part: str) -> Iterator[None]:
        """The loop does what ``part`` of ``START_PHRASES`` says, and then goes on with what it did before."""
        before = self.name
        self.begin(START_PHRASES[part])
        try:
            yield
        finally:
            self.begin(before)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """The loop does what ``name`` of ``PHRASES`` says, and then goes on with what it did before."""
        before = self.name
        self._present = (PHRASES[name], time.monotonic())
        try:
            yield
            self._ended[name] = time.monotonic()
        finally:
            self._present = (before, time.monotonic())
