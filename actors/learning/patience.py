"""How long the learner's ranks may take for a call before they count as hung."""

from __future__ import annotations

LEAST_SECONDS = 120.0
"""A call gets at least so long, however short those before it were."""
TIMES_LONGEST = 10
"""A call gets this many times the seconds of the longest call of the same method so far."""


class Patience:
    """The time limits of the calls to a group of ranks, from how long earlier calls took.

    Args:
        first_seconds: the limit of a method that has not been called yet.
    """

    def __init__(self, first_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._longest: dict[str, float] = {}

    def limit(self, method: str) -> float:
        """Seconds after which a call of ``method`` counts as hung."""
        if method not in self._longest:
            return self._first_seconds
        return min(self._first_seconds, max(LEAST_SECONDS, TIMES_LONGEST * self._longest[method]))

    def record(self, method: str, seconds: float) -> None:
        """Take note that a call of ``method`` was answered after ``seconds``."""
        self._longest[method] = max(seconds, self._longest.get(method, 0.0))
