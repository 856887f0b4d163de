"""The policy on one rank, as ``LearnerWorker`` loads it: it publishes its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch

from actors.weights.store import PublishedWeights
from actors.weights.transport import VersionGoneError, WeightTransport
from environments.errors import LearnerLostError
from policies.engines.weights import WeightBucket, narrowed, share_of
from policies.learning.verl import weights as verl_weights
from policies.learning.verl.learner import VerlLearner
from policies.learning.verl.worker import on_all_ranks


class PublishingLearner(VerlLearner):
    """``VerlLearner`` that publishes its weights.

    Args:
        store: the ``WeightStore`` that knows the transport.
        engine_dtype: ``half_dtype`` of the engines.

    Raises:
        ConfigError: also if the weights' transport cannot work on this node.
    """

    def __init__(self, store: ray.actor.ActorHandle, engine_dtype: str | None, **arguments: Any) -> None:
        self._transport: WeightTransport = ray.get(store.transport.remote())
        self._transport.open()
        self._dtype = None if engine_dtype is None else getattr(torch, engine_dtype)
        super().__init__(**arguments)

    def publish_weights(self, version: int) -> Iterator[Any]:
        """Write the present weights, adapters merged, as the engines hold them; yield the pieces."""
        weights = self.weights()
        is_shared = self._transport.by_all_ranks
        own = share_of(weights, self.rank, self.world_size) if is_shared else weights
        try:
            for piece in self._transport.publish(version, narrowed(own, self._dtype), self.rank):
                if is_shared or self.rank == 0:
                    yield piece
        finally:  # all ranks gather each tensor together: if one stopped early, the others would hang
            for _ in weights:
                pass

    @on_all_ranks
    def take_over(self, published: PublishedWeights, schedule: dict[str, Any]) -> None:
        """Go on from published weights, and with the learning rate that came after them.

        Args:
            schedule: as ``schedule`` has returned it; empty to leave the present one.

        Raises:
            WeightTransportError: they cannot be read.
            LearnerLostError: they are not all that the model has, or are gone.
        """
        fetched = FetchedWeights()
        try:
            asyncio.run(published.fetch(self._transport, fetched))
        except VersionGoneError as error:
            raise LearnerLostError(str(error)) from error
        verl_weights.fill(self._tensors(), fetched.tensor)
        if schedule:
            self.set_schedule(schedule)


class FetchedWeights:
    """Takes whole tensors from a transport, by name."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self._tensors = {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name.

        Raises:
            LearnerLostError: there is none. Engines read the experts of a mixture one by one, and so they are
                published; the learner holds those of a layer as one.
        """
        if name not in self._tensors:
            raise LearnerLostError(f"The published weights lack {name!r}: they make no learner.")
        return self._tensors[name]
