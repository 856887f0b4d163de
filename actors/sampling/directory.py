"""Actors that the replicas of a policy server share: above all those from which they fetch requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import ray

from actors.ray_tools.calls import wait_with_timeout
from actors.ray_tools.placement import NAMESPACE, beside_driver, start_actor
from actors.sampling.request_queue import most_beside
from actors.settings import MANY_CALLS
from actors.timing import PAIRING_SECONDS
from environments.errors import SamplerError

MAX_REPLICAS = 16
"""Replicas that poll one sampling actor: 128 that polled 200 each twice a second would do nothing else."""
_NAME = "samplers-of-"
"""Beginning of a directory's name; the policy server's follows."""
RELIEF_SECONDS = 10.0
"""Seconds between two sampling actors that an overloaded replica leaves: its load takes time to sink."""


class Pairing:
    """The choice of the replicas that serve each sampling actor: ``MAX_REPLICAS``, or all that there are.

    Rendezvous hashing: those with the highest hash of both names. So each replica serves about equally many,
    and one that comes or goes changes only its own pairs (Thaler and Ravishankar, "Using name-based mappings
    to increase hit rates", 1998). A replica that has more than twice the requests of another one leaves a
    sampling actor to the next in its order.
    """

    def __init__(self) -> None:
        self._replicas_of: dict[int, list[str]] = {}
        """Replicas by sampling actor, those that serve it first."""
        self._left_by: dict[int, list[str]] = {}
        """Overloaded replicas that have left a sampling actor, the last one at the end."""
        self._loads: dict[str, int] = {}
        self._reported: dict[str, float] = {}
        self._relieved: dict[str, float] = {}

    def add(self, sampler: int) -> None:
        """Have a sampling actor served."""
        self._left_by[sampler] = []
        self._sort(sampler)

    def remove(self, sampler: int) -> None:
        """Have a sampling actor served no more."""
        self._left_by.pop(sampler, None)
        self._replicas_of.pop(sampler, None)

    def report(self, replica: str, load: int, now: float) -> bool:
        """Take note of a replica with ``load`` requests at ``now`` (seconds); return whether pairs change."""
        before = set(self._reported)
        self._loads[replica], self._reported[replica] = load, now
        for name in [name for name, then in self._reported.items() if now - then > 3 * PAIRING_SECONDS]:
            del self._loads[name], self._reported[name]
            self._relieved.pop(name, None)
        if is_other := set(self._reported) != before:
            for sampler in self._left_by:
                self._sort(sampler)
        return is_other or (load > most_beside(min(self._loads.values())) and self._relieve(replica, now))

    def samplers_of(self, replica: str) -> set[int]:
        """The sampling actors that ``replica`` is to serve."""
        return {number for number, order in self._replicas_of.items() if replica in order[:MAX_REPLICAS]}

    def _relieve(self, replica: str, now: float) -> bool:
        """Let a replica leave the sampling actor whose next one has least to do; return whether it does."""
        served = [each for each in self.samplers_of(replica) if len(self._replicas_of[each]) > MAX_REPLICAS]
        if not served or now - self._relieved.get(replica, -RELIEF_SECONDS) < RELIEF_SECONDS:
            return False
        sampler = min(served, key=lambda each: self._loads[self._replicas_of[each][MAX_REPLICAS]])
        if self._loads[self._replicas_of[sampler][MAX_REPLICAS]] >= self._loads[replica]:
            return False
        self._relieved[replica] = now
        self._left_by[sampler] = [*(each for each in self._left_by[sampler] if each != replica), replica]
        self._sort(sampler)
        return True

    def _sort(self, sampler: int) -> None:
        """Order the replicas that may serve a sampling actor: those come last that have left it."""
        left = self._left_by[sampler]
        self._replicas_of[sampler] = sorted(
            self._loads, key=lambda name: (left.index(name) + 1 if name in left else 0, _hash(sampler, name))
        )


@lru_cache(maxsize=100_000)
def _hash(sampler: int, replica: str) -> bytes:
    return blake2b(f"{sampler} {replica}".encode(), digest_size=8).digest()


def start_directory(app: str) -> ray.actor.ActorHandle:
    """Start the directory of the policy server ``app``, under a name by which sampling actors find it.

    Serve could find it too, but its client costs each of them 0.6 s and a thread that is always at work.
    """
    return start_actor(SamplerDirectory, name=_NAME + app, namespace=NAMESPACE, **beside_driver())


def find_directory(app: str) -> ray.actor.ActorHandle:
    """The directory of the policy server ``app``. Raises ``SamplerError`` if there is none."""
    try:
        return ray.get_actor(_NAME + app, NAMESPACE)
    except ValueError as error:
        raise SamplerError(
            f"No program of this Ray cluster serves a policy by the name {app!r}. One that `serve deploy` "
            "has started answers over HTTP only: use engine_name='openai' with its base_url."
        ) from error


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class SamplerDirectory:
    """The sampling actors of one policy server, by number, and other actors that its replicas share.

    A sampling actor adds itself; all replicas, also those that start later, learn here which ones they serve.
    """

    def __init__(self) -> None:
        self._samplers: dict[int, ray.actor.ActorHandle] = {}
        self._num_added = 0
        self._pairing = Pairing()
        self._changed = asyncio.Condition()
        self._shared: dict[str, ray.actor.ActorHandle] = {}

    async def add(self, sampler: ray.actor.ActorHandle) -> None:
        """Have replicas, now and later, fetch requests from ``sampler``. Idempotent."""
        if sampler in self._samplers.values():
            return
        self._num_added += 1
        self._samplers[self._num_added] = sampler
        self._pairing.add(self._num_added)
        await self._notify()

    async def remove(self, number: int) -> None:
        """Take a sampling actor out that has died."""
        self._samplers.pop(number, None)
        self._pairing.remove(number)

    async def samplers_of(
        self, replica: str, load: int, known: Collection[int]
    ) -> dict[int, ray.actor.ActorHandle]:
        """The sampling actors that ``replica`` is to serve, by number, as soon as they are not ``known``.

        The known ones come after ``PAIRING_SECONDS``, for the replica to report again: it is there, and has
        ``load`` requests.
        """
        if self._pairing.report(replica, load, time.monotonic()):
            await self._notify()
        await wait_with_timeout(
            self._changed, lambda: self._pairing.samplers_of(replica) != set(known), PAIRING_SECONDS
        )
        return {number: self._samplers[number] for number in self._pairing.samplers_of(replica)}

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def shared(self, name: str, actor_class: Any) -> ray.actor.ActorHandle:
        """The actor of this name for all replicas; it starts with the first that wants it, and ends with
        the directory."""
        if name not in self._shared:
            self._shared[name] = actor_class.options(**beside_driver()).remote()
        return self._shared[name]
