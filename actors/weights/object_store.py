"""Weights through Ray's object store: the default."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import ray

from actors.weights.transport import WeightTarget, WeightTransport
from policies.engines.weights import pack

if TYPE_CHECKING:
    import torch

Location = list[ray.ObjectRef]
"""References to ``WeightBucket`` objects."""


class ObjectStoreTransport(WeightTransport):
    """Puts the weights into Ray's object store, from where each node copies them once."""

    def __init__(self, folder: str = "") -> None:
        pass

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], rank: int) -> Location:
        return [ray.put(bucket) for bucket in pack(tensors)] if rank == 0 else []

    async def keep(self, version: int, location: Location) -> Location:
        # Put anew, which costs a copy: an object dies with the process that has put it, and that is a rank.
        return [ray.put(await bucket) for bucket in location]

    async def fetch(self, version: int, location: Location, engine: WeightTarget) -> None:
        await engine.load_weights(version, await asyncio.gather(*location))
