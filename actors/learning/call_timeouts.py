"""Time limits of calls to the learner's ranks: one that takes longer counts as hung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from actors.timing import MIN_TIMEOUT_SECONDS
from policies.learning.algorithm import Algorithm
from policies.learning.samples import TrainBatch

SLOWDOWN_FACTOR = 10
"""A call gets this many times what the slowest call of the same method so far would have taken for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Seconds after which a call counts as hung, and where they are from."""

    seconds: float
    origin: str

    @property
    def exceeded(self) -> str:
        """Error text of a call that took longer."""
        return (
            f"A learner rank did not answer for {self.seconds:g} s ({self.origin}): it hangs or was stopped."
        )


class CallTimeouts:
    """The time limits of the calls to a group of ranks, from how long earlier calls took.

    A call that learns or scores takes as long as it has tokens: ten demonstrations at first, and then all
    that the policy did well. So its limit grows with them. Calls without tokens are always the same work.

    Args:
        most_seconds: the limit of a call that nothing is known of, and the highest of all.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._longest: dict[tuple[str, bool], float] = {}
        """Seconds of calls, by method and whether they had tokens."""
        self._slowest: dict[tuple[str, bool], float] = {}
        """Seconds per token of the same calls."""

    def limit(self, method: str, num_tokens: int = 0) -> Limit:
        """Limit of a call of ``method`` in which so many tokens go through the model."""
        kind = (method, num_tokens > 0)
        most = Limit(seconds=self._most_seconds, origin="learner.max_call_seconds, which may be too low")
        if kind not in self._longest:
            return most
        expected = max(self._longest[kind], self._slowest[kind] * num_tokens)
        usual = Limit(
            seconds=max(MIN_TIMEOUT_SECONDS, SLOWDOWN_FACTOR * expected),
            origin=f"{SLOWDOWN_FACTOR} times the {expected:.3g} s that `{method}` took before for as much, "
            f"and at least {MIN_TIMEOUT_SECONDS:g} s",
        )
        return min(most, usual, key=attrgetter("seconds"))

    def record(self, method: str, seconds: float, num_tokens: int = 0) -> None:
        """Take note that a call of ``method`` was answered after ``seconds``."""
        kind = (method, num_tokens > 0)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self._slowest[kind] = max(seconds / max(1, num_tokens), self._slowest.get(kind, 0.0))


def num_trained_tokens(batches: Sequence[TrainBatch]) -> int:
    """Tokens that go through the model in an optimizer step on each of ``batches`` that takes one."""
    return sum(sum(map(len, batch.samples)) for batch in batches if batch.has_sampled_tokens)


def num_scored_tokens(batches: Sequence[TrainBatch], algorithm: Algorithm) -> int:
    """Tokens that go through the model where ``batches`` are scored, by the policy and by the reference."""
    scored = [] if algorithm.bypass else batches[0 if algorithm.needs_all_scores else 1 :]
    return num_trained_tokens([*scored, *(batches if algorithm.uses_reference else ())])
