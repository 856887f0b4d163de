"""The newest weights and their version: the one place that engines take weights from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray

from policies.engines.weights import WeightBucket


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version of the policy. ``buckets`` are references to ``WeightBucket`` objects."""

    version: int
    buckets: list[ray.ObjectRef]


@ray.remote(num_cpus=0)
class WeightStore:
    """What the replicas of a policy server follow: the newest weights, and the actors that sample them.

    Publishing is a put. Each replica pulls when it is ready, so a replica that hangs or starts late delays
    nobody, and none of them ever serves the model it was started from once there is a newer version. The
    weights live as long as this actor, not as long as their writer.
    """

    def __init__(self) -> None:
        self._newest: PublishedWeights | None = None
        self._samplers: dict[int, ray.actor.ActorHandle] = {}
        self._num_registered = 0
        self._changed = asyncio.Condition()

    # -- weights -------------------------------------------------------------------------------------

    async def publish(self, version: int, *buckets: WeightBucket) -> None:
        """Make ``buckets`` the newest weights. A version that is not newer than the newest is refused."""
        if self._newest is not None and version <= self._newest.version:
            raise ValueError(f"Version {version} is not newer than {self._newest.version}.")
        # Put anew, which costs a copy: the objects that arrived belong to the learner and die with it.
        kept = PublishedWeights(version, [ray.put(bucket) for bucket in buckets])
        async with self._changed:
            self._newest = kept
            self._changed.notify_all()

    async def newest(self) -> PublishedWeights | None:
        """The newest weights, or None if nothing was published yet."""
        return self._newest

    async def newer_than(self, version: int) -> PublishedWeights:
        """Wait until there is a version after ``version``, and return the newest."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest is not None and self._newest.version > version)
        assert self._newest is not None
        return self._newest

    # -- sampling actors -----------------------------------------------------------------------------

    async def register(self, sampler: ray.actor.ActorHandle) -> None:
        """Have all replicas, now and later, fetch requests from ``sampler``. Twice is as good as once."""
        if sampler in self._samplers.values():
            return
        async with self._changed:
            self._num_registered += 1
            self._samplers[self._num_registered] = sampler
            self._changed.notify_all()

    async def forget(self, number: int) -> None:
        """Nobody shall look for this sampling actor any more: it is dead."""
        self._samplers.pop(number, None)

    async def samplers_after(self, number: int) -> dict[int, ray.actor.ActorHandle]:
        """Wait until there are sampling actors that were registered after ``number``; they by number."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(each > number for each in self._samplers))
        return {each: sampler for each, sampler in self._samplers.items() if each > number}
