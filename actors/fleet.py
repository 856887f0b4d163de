"""The rollout actors as one elastic fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.queue import Queue

from actors.rollout import Pair, RolloutActor, RolloutLimits, RolloutOrder, failed
from actors.settings import FleetConfig
from environments.types import TerminationReason, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """What the fleet is doing: orders that wait, rollouts in play, actors lost since it started."""

    num_actors: int
    num_waiting: int
    num_running: int
    num_lost: int


@ray.remote(num_cpus=0)
class RolloutFleet:
    """Hands orders to rollout actors and puts each trajectory into the stream, exactly once per order.

    A slot is one actor and the coroutine that keeps it busy. The fleet, not the rollout actor, writes to
    the stream: only it knows whether an actor that died had already delivered.

    consumes orders · waits for room in the stream · produces one trajectory per order
    """

    def __init__(
        self,
        pair: Pair,
        sampler: ray.actor.ActorHandle,
        queue: Queue,
        limits: RolloutLimits,
        config: FleetConfig,
    ) -> None:
        self._pair, self._sampler, self._queue = pair, sampler, queue
        self._limits, self._config = limits, config
        self._orders: asyncio.Queue[RolloutOrder] = asyncio.Queue()
        self._slots: dict[int, asyncio.Task[None]] = {}
        self._idle: set[int] = set()
        self._num_running = 0
        self._num_lost = 0

    async def resize(self, num_actors: int) -> None:
        """Grow or shrink at once; an actor that is still playing ends with its rollout."""
        self._config.num_actors = num_actors
        for index in [each for each in self._idle if each >= num_actors]:
            self._slots[index].cancel()
        for index in range(num_actors):
            if index not in self._slots or self._slots[index].done() or self._slots[index].cancelling():
                self._slots[index] = asyncio.create_task(self._slot(index))

    async def submit(self, orders: Sequence[RolloutOrder]) -> None:
        """Queue orders for the next free actors."""
        for order in orders:
            self._orders.put_nowait(order)

    async def status(self) -> FleetStatus:
        """Counts, and the error of a slot that has died: a fleet with a bug must not look idle."""
        for slot in self._slots.values():
            if slot.done() and not slot.cancelled() and slot.exception() is not None:
                raise slot.exception()  # type: ignore[misc]
        num_actors = sum(not slot.done() for slot in self._slots.values())
        return FleetStatus(num_actors, self._orders.qsize(), self._num_running, self._num_lost)

    async def _slot(self, index: int) -> None:
        actor = self._start_actor()
        try:
            while index < self._config.num_actors:
                self._idle.add(index)
                order = await self._orders.get()
                self._idle.discard(index)
                self._num_running += 1
                trajectory, actor = await self._play(order, actor)
                self._num_running -= 1
                await self._queue.put_async(trajectory)
        finally:
            self._idle.discard(index)
            ray.kill(actor)

    async def _play(
        self, order: RolloutOrder, actor: ray.actor.ActorHandle
    ) -> tuple[Trajectory, ray.actor.ActorHandle]:
        """The trajectory of ``order``, and the actor that the slot goes on with."""
        cause = ""
        for _ in range(self._config.retries + 1):
            try:
                # The first order also waits for the process to come up: that is not the rollout's time.
                await actor.ready.remote()
                return await asyncio.wait_for(actor.run.remote(order), self._limits.timeout_seconds), actor
            except TimeoutError:
                text = f"The rollout ran longer than rollout.timeout_seconds={self._limits.timeout_seconds}."
                return failed(order, TerminationReason.TIMEOUT, text), self._replace(actor)
            except RayActorError as error:  # the process is gone: try again in a fresh one
                cause = f"The rollout actor died {self._config.retries + 1} times: {error}"
                logger.warning("Rollout %s lost its actor: %s", order.rollout_id, error)
                actor = self._replace(actor)
            except RayTaskError as error:  # not a failure of a rollout but of our own code around it
                return failed(order, TerminationReason.ERROR, str(error)), self._replace(actor)
        return failed(order, TerminationReason.ERROR, cause), actor

    def _start_actor(self) -> ray.actor.ActorHandle:
        options = {"num_cpus": self._config.num_cpus_per_actor}
        return RolloutActor.options(**options).remote(  # type: ignore[attr-defined]
            self._pair, self._sampler, self._limits
        )

    def _replace(self, actor: ray.actor.ActorHandle) -> ray.actor.ActorHandle:
        self._num_lost += 1
        ray.kill(actor)
        return self._start_actor()
