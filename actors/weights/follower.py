"""The replica's end of the weights' way: it keeps one engine at the newest version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from actors.timing import FETCH_RETRY_SECONDS, MISSING_VERSION_SECONDS
from actors.weights.store import PublishedWeights
from actors.weights.transport import VersionGoneError, WeightTransport, WeightTransportError
from environments.errors import ConfigError, WeightsError
from policies.engines.base import Engine


async def open_transport(store: ray.actor.ActorHandle) -> WeightTransport:
    """The transport of a weight store, opened in this process.

    Raises:
        ConfigError: it cannot work on this node. The store knows of it then, too: Serve would start the
            replica again and again.
    """
    transport: WeightTransport = await store.transport.remote()
    try:
        transport.open()
    except ConfigError as error:
        await store.report.remote(error)
        raise
    return transport


@dataclass(slots=True)
class WeightFollower:
    """Fetches published weights into an engine.

    Args:
        store: the ``WeightStore`` to follow.
        on_loaded: called after each exchange of the weights.
    """

    store: ray.actor.ActorHandle
    transport: WeightTransport
    engine: Engine
    on_loaded: Callable[[], None]
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """consumes published versions · waits for the store · produces an engine that serves the newest

        Raises:
            ActorDiedError: the store is gone, and the program that has made it.
            WeightsError: the newest version cannot be read, or is not all that the engine has.
        """
        while True:
            newer: PublishedWeights | None = await self.store.newer_than.remote(self.engine.version)
            if newer is not None:
                await self._load(newer)

    async def catch_up(self) -> None:
        """Load the newest version now. Raises as ``run`` does."""
        newest: PublishedWeights | None = await self.store.newest.remote()
        if newest is not None:
            await self._load(newest)

    async def _load(self, weights: PublishedWeights) -> None:
        async with self._loading:
            if weights.version <= self.engine.version:
                return
            try:
                await self._fetch(weights)
            except WeightsError as error:
                await self.store.report.remote(error)
                raise
        self.on_loaded()

    async def _fetch(self, weights: PublishedWeights) -> None:
        """Fetch ``weights``, or newer ones if they have taken their place meanwhile."""
        deadline = time.monotonic() + MISSING_VERSION_SECONDS
        while True:
            try:
                return await weights.fetch(self.transport, self.engine)
            except WeightTransportError as error:
                tried, weights = weights, await self.store.newest.remote()
                if weights.version > tried.version:
                    continue
                if not isinstance(error, VersionGoneError) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(FETCH_RETRY_SECONDS)
