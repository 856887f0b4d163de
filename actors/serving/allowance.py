"""What a client may use in a minute: requests, and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """So much a minute. What is not used is saved, up to what a minute gives.

    The cost of a request may be known only afterwards, so an allowance can be overdrawn: nothing is allowed
    until time has made up for it.

    Args:
        per_minute: ``None`` allows everything.
        clock: seconds that never go back.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._most = max(1.0, per_minute or 0)
        self._left = self._most
        self._clock = clock
        self._time = clock()

    def spend(self, amount: float) -> None:
        """Take ``amount`` away."""
        self._refill()
        self._left -= amount

    def seconds_to_wait(self) -> float:
        """Until there is at least 1 left; 0 if there is now."""
        if self._per_minute is None:
            return 0.0
        self._refill()
        return max(0.0, (1 - self._left) * 60 / self._per_minute)

    def _refill(self) -> None:
        now = self._clock()
        if self._per_minute is not None:
            self._left = min(self._most, self._left + (now - self._time) * self._per_minute / 60)
        self._time = now
