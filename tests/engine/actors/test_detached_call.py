"""Calls that go on when the call in which they were made is cancelled, on real Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from machine import wait_until

from actors.ray_tools.calls import detached_call


@ray.remote(num_cpus=0)
class Worker:
    """Works until it is told to end."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self._end = asyncio.Event()

    async def work(self, name: str) -> None:
        self.states[name] = "works"
        try:
            await self._end.wait()
        except asyncio.CancelledError:
            self.states[name] = "cancelled"
            raise
        self.states[name] = "has ended"

    async def end(self) -> None:
        self._end.set()

    async def state(self, name: str) -> str | None:
        return self.states.get(name)


@ray.remote(num_cpus=0)
class Caller:
    async def call(self, worker: Any) -> None:
        own, lasting = worker.work.remote("own"), detached_call(worker.work.remote, "lasting")
        await asyncio.gather(own, lasting)


def test_lasting_call_goes_on_when_call_around_it_is_cancelled(ray_cluster: None) -> None:
    worker, caller = Worker.remote(), Caller.remote()

    def state(name: str) -> str | None:
        return ray.get(worker.state.remote(name))

    call = caller.call.remote(worker)
    wait_until(lambda: state("own") == state("lasting") == "works")
    ray.cancel(call)
    wait_until(lambda: state("own") == "cancelled")
    assert state("lasting") == "works"
    ray.get(worker.end.remote())
    wait_until(lambda: state("lasting") == "has ended")
