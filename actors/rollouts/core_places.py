"""How many rollout actors start at a time. The fleet uses it."""

from __future__ import annotations

import asyncio
import os

import ray

START_SECONDS = 1.0
"""CPU time of a core that an actor is given to start. Many at a time would starve a learner beside them."""


class CorePlaces:
    """A place for each core of the cluster; an actor that starts has one for ``START_SECONDS``."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def count(self) -> None:
        """Have as many places as the cluster has cores now."""
        self._free = asyncio.Semaphore(await asyncio.to_thread(num_cores))

    async def take(self) -> None:
        """Wait for a free place."""
        free = self._free  # ``count`` may put others in their place meanwhile
        await free.acquire()
        asyncio.get_running_loop().call_later(START_SECONDS, free.release)


def num_cores() -> int:
    """CPU cores of the cluster, as if all nodes were like this one: what Ray counts may be set by hand."""
    return (os.cpu_count() or 1) * sum(node["Alive"] for node in ray.nodes())
