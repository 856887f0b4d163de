"""Weights through Ray's object store: the default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.weights.transport import WeightTarget, WeightTransport
from policies.engines.weights import WeightBucket


class ObjectStoreTransport(WeightTransport):
    """Makes each bucket of a rank's shards a piece."""

    def __init__(self, folder: str = "") -> None:
        pass

    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> Iterable[WeightBucket]:
        return buckets

    async def fetch(self, version: int, pieces: Sequence[WeightBucket], engine: WeightTarget) -> None:
        await engine.load_weights(version, pieces)
