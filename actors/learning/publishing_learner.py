"""The policy on one rank, as ``LearnerWorker`` loads it: it publishes its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import torch

from actors.weights.store import PublishedWeights
from actors.weights.transport import VersionGoneError, WeightTransport
from environments.errors import LearnerLostError
from policies.engines.weights import WeightBucket, WholeTensors, pack
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
        self._copy: list[WeightBucket] = []
        self._copied: list[torch.Tensor] = []
        """The shards of the copy, as views of it."""
        super().__init__(**arguments)

    @torch.no_grad()
    def begin_publish(self) -> dict[str, Any]:
        """Copy this rank's shards of the present weights as the engines hold them; return ``schedule``."""
        if not self._copy:
            self._copy = list(pack(self.weights(), self._dtype))
            self._copied = [shard for bucket in self._copy for _, shard in bucket.shards()]
        else:  # into memory that is there: to get it takes several times as long as the copy
            for (_, shard), copied in zip(self.weights(), self._copied, strict=True):
                copied.copy_(shard)
        return self.schedule()

    def publish_weights(self, version: int) -> Iterator[Any]:
        """Write the copy, and yield the pieces. The rank may learn meanwhile."""
        yield from self._transport.publish(version, self._copy, self.rank)

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
        self._tensors: Mapping[str, torch.Tensor] = {}

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self._tensors = WholeTensors(buckets)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name.

        Raises:
            LearnerLostError: there is none. Engines read the experts of a mixture one by one, and so they are
                published; the learner holds those of a layer as one.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise LearnerLostError(f"The published weights lack {name!r}: they make no learner.") from None
