"""The newest weights and their version: the one place that engines take weights from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray

from policies.weights import WeightBucket


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version of the policy. ``buckets`` are references to ``WeightBucket`` objects."""

    version: int
    buckets: list[ray.ObjectRef]


@ray.remote(num_cpus=0)
class WeightStore:
    """Holds the newest published weights; they live as long as this actor, not as long as their writer.

    Publishing is a put. Each policy replica pulls when it is ready, so a replica that hangs or starts
    late delays nobody, and none of them ever serves the model it was started from once there is a newer
    version.
    """

    def __init__(self) -> None:
        self._newest: PublishedWeights | None = None
        self._published = asyncio.Condition()

    async def publish(self, version: int, *buckets: WeightBucket) -> None:
        """Make ``buckets`` the newest weights. A version that is not newer than the newest is refused."""
        if self._newest is not None and version <= self._newest.version:
            raise ValueError(f"Version {version} is not newer than {self._newest.version}.")
        # Put anew, which costs a copy: the objects that arrived belong to the learner and die with it.
        kept = PublishedWeights(version, [ray.put(bucket) for bucket in buckets])
        async with self._published:
            self._newest = kept
            self._published.notify_all()

    async def newest(self) -> PublishedWeights | None:
        """The newest weights, or None if nothing was published yet."""
        return self._newest

    async def newer_than(self, version: int) -> PublishedWeights:
        """Wait until there is a version after ``version``, and return the newest."""
        async with self._published:
            await self._published.wait_for(
                lambda: self._newest is not None and self._newest.version > version
            )
        assert self._newest is not None
        return self._newest
