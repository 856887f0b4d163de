"""Store of the newest weights' version and place: an actor that all replicas call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import ObjectLostError

from actors.ray_tools.calls import wait_with_timeout
from actors.settings import MANY_CALLS
from actors.weights.transport import ObjectStoreTransport, VersionLostError, WeightTarget, WeightTransport
from actors.weights.turns import EngineTurns
from environments.errors import TroupeError


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version of the policy. ``pieces`` are for the transport that carries it."""

    version: int
    pieces: Sequence[ray.ObjectRef]

    async def fetch(self, transport: WeightTransport, engine: WeightTarget) -> None:
        """Load the weights into ``engine``. Raises as the transport's ``fetch`` does."""
        try:
            pieces = await asyncio.gather(*self.pieces)
        except ObjectLostError as error:
            raise VersionLostError(
                f"Version {self.version} of the weights was lost with the node that had them: {error}"
            ) from error
        await transport.fetch(self.version, pieces, engine)


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class WeightStore:
    """Keeps the newest version of the weights.

    A publish does not wait for the replicas: each one fetches the newest version when it is ready. So a
    replica that hangs delays no other, and one that starts late never serves the model that it was started
    from once there is a newer version.

    Args:
        transport: carries the weights. The default is Ray's object store.
    """

    def __init__(self, transport: WeightTransport | None = None) -> None:
        self._transport = transport or ObjectStoreTransport()
        self._newest: PublishedWeights | None = None
        self._failure: TroupeError | None = None
        self._turns = EngineTurns()
        self._changed = asyncio.Condition()

    async def transport(self) -> WeightTransport:
        """The transport, for those who write or read weights."""
        return self._transport

    async def publish(self, version: int, pieces: Sequence[ray.ObjectRef]) -> None:
        """Make the weights in ``pieces`` the newest ones. Raises ``ValueError`` unless they are newer."""
        if self._newest is not None and version <= self._newest.version:
            raise ValueError(f"Version {version} is not newer than {self._newest.version}.")
        kept = PublishedWeights(version, await self._transport.keep(version, pieces))
        async with self._changed:
            self._newest = kept
            self._changed.notify_all()

    async def newest(self) -> PublishedWeights | None:
        """The newest weights; ``None`` before the first publish."""
        return self._newest

    async def newer_than(self, version: int) -> PublishedWeights | None:
        """The newest version, when there is one after ``version``; ``None`` if none comes for a minute."""
        await wait_with_timeout(self._changed, lambda: self._is_newer(version))
        return self._newest if self._is_newer(version) else None

    def _is_newer(self, version: int) -> bool:
        return self._newest is not None and self._newest.version > version

    async def take_turn(self, asleep: bool) -> None:
        """Have the engines sleep or wake: see ``EngineTurns.take``."""
        await self._turns.take(asleep)

    async def next_turn(self, replica: ray.actor.ActorHandle, asleep: bool) -> bool:
        """Return whether ``replica`` is to sleep: see ``EngineTurns.next``."""
        return await self._turns.next(replica, asleep)

    async def report(self, failure: TroupeError) -> None:
        """Take note of what keeps a replica from following, and would keep the one that replaces it."""
        self._failure = failure

    async def check_followers(self) -> None:
        """Raise what a replica has reported, if one has."""
        if self._failure is not None:
            raise self._failure
