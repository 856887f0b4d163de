"""The queues that a replica samples for: those of the sampling actors with which it is paired."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from actors.sampling.queue_worker import QueueWorker, ReadCalls, serve_queue
from environments.errors import PartLostError, SamplerError
from policies.engines.base import Engine

logger = logging.getLogger(__name__)


async def _nothing_newer() -> None:
    """A version that is pinned stays."""


class ServedQueues:
    """Samples for the sampling actors that a replica is paired with, by a ``QueueWorker`` for each.

    Args:
        replica: this replica's name, unique in the directory.
        server: name of its policy server for the sampling actors.
        store: the ``WeightStore``, which is the program's, for a fault that it has to know of.
        directory: the server's ``SamplerDirectory``.
        engine, read_calls, catch_up: as for ``QueueWorker``.
    """

    def __init__(
        self,
        replica: str,
        server: str,
        store: ray.actor.ActorHandle,
        directory: ray.actor.ActorHandle,
        engine: Engine,
        read_calls: ReadCalls,
        catch_up: Callable[[], Awaitable[None]] = _nothing_newer,
    ) -> None:
        self._replica, self._server = replica, server
        self._store: Any = store
        self._directory: Any = directory
        self._engine, self._read_calls, self._catch_up = engine, read_calls, catch_up
        self._workers: dict[ray.actor.ActorHandle, QueueWorker] = {}
        self._samplers: dict[int, ray.actor.ActorHandle] = {}

    def wake(self) -> None:
        """Have all workers poll now: there is something new to report, such as a version."""
        for worker in self._workers.values():
            worker.wake()

    async def run(self) -> None:
        """consumes sampling actors · waits for the directory · produces a ``QueueWorker`` for each of ours

        Raises ``ActorDiedError``: the directory is gone.
        """
        tasks = set()
        while True:
            self._samplers = await self._samplers_to_serve()
            for sampler, worker in self._workers.items():
                worker.leave(sampler not in self._samplers.values())
            for number, sampler in self._samplers.items():
                if sampler not in self._workers:
                    task = asyncio.create_task(self._sample_for(number, sampler))
                    tasks.add(task)  # asyncio itself keeps no reference to a running task
                    task.add_done_callback(tasks.discard)

    async def _samplers_to_serve(self) -> dict[int, ray.actor.ActorHandle]:
        load = self._engine.requests_in_flight
        try:
            return await self._directory.samplers_of.remote(self._replica, load, [*self._samplers])
        except ActorDiedError as error:
            # Mostly it has died with its program. If it has died alone, the program has to learn of it.
            self._store.report.remote(PartLostError(f"The directory of sampling actors is gone: {error}"))
            raise

    async def _sample_for(self, number: int, sampler: ray.actor.ActorHandle) -> None:
        """Answer the requests of one sampling actor, until that dies."""
        poll = partial(sampler.poll.remote, self._server)
        connected = partial(self._workers.__setitem__, sampler)
        name = f"{self._replica} (pid {os.getpid()} on {socket.gethostname()})"
        try:
            await serve_queue(name, self._engine, poll, self._catch_up, connected, self._read_calls)
        except RayError as error:  # if it is alive after all, it misses the replicas and adds itself again
            logger.info("A sampling actor is gone: %s", error)
            await self._directory.remove.remote(number)
        except SamplerError as error:  # check_health says so too, and Serve replaces this replica
            logger.error("The engine has failed: %s", error)
        finally:
            self._workers.pop(sampler, None)
