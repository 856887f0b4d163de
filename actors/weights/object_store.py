"""Weights through Ray's object store: the default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from actors.weights.transport import WeightTarget, WeightTransport
from policies.engines.weights import WeightBucket, pack

if TYPE_CHECKING:
    import torch


class ObjectStoreTransport(WeightTransport):
    """Makes each bucket of a rank's shards a piece."""

    def __init__(self, folder: str = "") -> None:
        pass

    def publish(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], rank: int
    ) -> Iterator[WeightBucket]:
        yield from pack(tensors)

    async def fetch(self, version: int, pieces: Sequence[WeightBucket], engine: WeightTarget) -> None:
        await engine.load_weights(version, pieces)
