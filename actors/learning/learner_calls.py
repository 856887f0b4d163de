"""Calls that the ranks of a learner take: all that a driver can have a learner do.

``LearnerGroup`` makes them, for the training loop. Each is called on all ranks with the same arguments.
The first rank's result counts. ``PublishingLearner`` and ``VerlCritic`` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from actors.weights.store import PublishedWeights
from environments.disk import FileDigest
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.learning.settings import OptimizerConfig


class RankCalls(Protocol):
    """Calls of any model in training."""

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

    def fit(self, batches: Sequence[TrainBatch], /) -> LearnerUpdate:
        """Learn from demonstrations: one optimizer step per batch."""

    def fit_weighted(self, batch: TrainBatch, /) -> LearnerUpdate:
        """Learn from tokens that are weighted by their advantages: one optimizer step."""

    def score(self, batches: Sequence[TrainBatch], /) -> list[TrainBatch]:
        """Add old log-probabilities, and those of the reference."""

    def update(self, batches: Sequence[TrainBatch], /) -> LearnerUpdate:
        """Learn from scored batches with advantages."""

    def logprobs(self, batch: TrainBatch, /) -> list[list[float]]:
        """Log-probability of each response token."""

    def begin_publish(self) -> dict[str, Any]:
        """Copy the weights for ``publish_weights``; return the state of the learning rate's schedule."""

    def publish_weights(self, version: int, /) -> Iterator[Any]:
        """Write the copy where replicas find it; yield the pieces. Called beside other work."""

    def take_over(self, published: PublishedWeights, schedule: dict[str, Any], /) -> None:
        """Go on from published weights and a schedule's state."""


class CriticCalls(RankCalls, Protocol):
    """Calls of the critic."""

    def values(self, batches: Sequence[TrainBatch], /) -> list[list[tuple[float, ...]]]:
        """Value of the state before each sampled token."""

    def update(self, batches: Sequence[TrainBatch], /) -> dict[str, float]:
        """Learn from returns; the result is its metrics."""
