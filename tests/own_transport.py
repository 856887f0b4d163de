"""A transport of a user's own: what ``server.weights.transport=own_transport:InlineTransport`` names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actors.weights.transport import WeightTransport
from policies.engines.base import Engine
from policies.engines.weights import WeightBucket


class InlineTransport(WeightTransport):
    """The weights travel with the news of their version: they are their own location. For tiny models."""

    def __init__(self, folder: str, max_num_bytes: int = 1 << 24) -> None:
        self._max_num_bytes = max_num_bytes

    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> Iterator[WeightBucket]:
        for bucket in buckets:
            assert len(bucket.buffer) <= self._max_num_bytes
            yield bucket

    async def fetch(self, version: int, location: list[WeightBucket], engine: Engine) -> None:
        await engine.load_weights(version, location)
