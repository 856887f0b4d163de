"""Wall time of one step of a training, by the part of the step that took it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from launch.training.activity import Activity


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
