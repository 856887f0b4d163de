"""Actors that the replicas of a policy server share: above all those from which they fetch requests."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from actors.ray_tools.calls import wait_with_timeout
from actors.ray_tools.placement import beside_driver
from actors.settings import MANY_CALLS


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class SamplerDirectory:
    """The sampling actors of one policy server, by number, and other actors that its replicas share.

    A sampling actor adds itself; all replicas, also those that start later, get it from here.
    """

    def __init__(self) -> None:
        self._samplers: dict[int, ray.actor.ActorHandle] = {}
        self._num_added = 0
        self._changed = asyncio.Condition()
        self._shared: dict[str, ray.actor.ActorHandle] = {}

    async def add(self, sampler: ray.actor.ActorHandle) -> None:
        """Have all replicas, now and later, fetch requests from ``sampler``. Idempotent."""
        if sampler in self._samplers.values():
            return
        async with self._changed:
            self._num_added += 1
            self._samplers[self._num_added] = sampler
            self._changed.notify_all()

    async def remove(self, number: int) -> None:
        """Take a sampling actor out that has died."""
        self._samplers.pop(number, None)

    async def added_after(self, number: int) -> dict[int, ray.actor.ActorHandle]:
        """The sampling actors with a number above ``number``, when there are any; none after a minute."""
        await wait_with_timeout(self._changed, lambda: any(each > number for each in self._samplers))
        return {each: sampler for each, sampler in self._samplers.items() if each > number}

    async def shared(self, name: str, actor_class: Any) -> ray.actor.ActorHandle:
        """The actor of this name for all replicas; it starts with the first that wants it, and ends with
        the directory."""
        if name not in self._shared:
            self._shared[name] = actor_class.options(**beside_driver()).remote()
        return self._shared[name]
