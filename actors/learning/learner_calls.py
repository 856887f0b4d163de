"""Calls that the ranks of a learner take: all that a driver can have a learner do.

``LearnerGroup`` makes them, for the training loop. Each is called on all ranks with the same arguments, and
the first rank's result counts; but of mini-batches each rank gets shards of its own, and columns are those of
its samples. ``PublishingLearner`` and ``VerlCritic`` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from actors.weights.store import PublishedWeights
from environments.disk import FileDigest
from policies.learning.division import Columns, RankShard
from policies.learning.samples import LearnerUpdate
from policies.learning.settings import OptimizerConfig


class RankCalls(Protocol):
    """Calls of any model in training."""

    pairs_per_token: int
    """Number of pairs of tokens off every path that are worth one token saved; 0 if rows have to be flat."""

    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int, /) -> None:
        """Start with a fresh optimizer and schedule on the present weights, which become the reference."""

    def begin_save(self, folder: str, /) -> Callable[[], dict[str, FileDigest]]:
        """Copy the state, and return a function that writes it."""

    def export(self, folder: str, /) -> dict[str, FileDigest]:
        """Write a share of the weights in Hugging Face's form, once all ranks have written their states."""

    def load(self, folder: str, /) -> str | None:
        """Restore a checkpoint; return a sentence on parts that could not be restored."""


class PolicyCalls(RankCalls, Protocol):
    """Calls of the policy."""

    def fit(self, shards: Sequence[RankShard], /) -> LearnerUpdate:
        """Learn from demonstrations: one optimizer step per batch."""

    def fit_weighted(self, shards: Sequence[RankShard], /) -> LearnerUpdate:
        """Learn from tokens that are weighted by their advantages: one optimizer step per batch."""

    def score(self, shards: Sequence[RankShard], /) -> list[Columns]:
        """Find old log-probabilities, and those of the reference and of a teacher that is loaded."""

    def update(self, shards: Sequence[RankShard], /) -> LearnerUpdate:
        """Learn from scored batches with advantages."""

    def logprobs(self, shards: Sequence[RankShard], /) -> list[Columns]:
        """Find the log-probability of each sampled token, as ``old_logprobs``."""

    def begin_publish(self) -> dict[str, Any]:
        """Copy the weights for ``publish_weights``; return the state of the learning rate's schedule."""

    def publish_weights(self, version: int, /) -> Iterator[Any]:
        """Write the copy where replicas find it; yield the pieces. Called beside other work."""

    def take_over(self, published: PublishedWeights, schedule: dict[str, Any], /) -> None:
        """Go on from published weights and a schedule's state."""


class CriticCalls(RankCalls, Protocol):
    """Calls of the critic."""

    def values(self, shards: Sequence[RankShard], /) -> list[Columns]:
        """Find the value of the state before each sampled token."""

    def update(self, shards: Sequence[RankShard], /) -> dict[str, float]:
        """Learn from returns; the result is its metrics."""
