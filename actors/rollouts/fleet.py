"""The rollout actors as one elastic fleet.

::

    submit ──▶ Dispatcher ── take ──▶ SlotLoop, once for each slot ──▶ finished ── _deliver ──▶ the stream
                   ▲                     │  its RolloutActor plays                               (a queue)
                   └── retry, or put ────┘

The states of a slot, and who changes them, are at the head of ``slot.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import ray

from actors.ray_tools.placement import draining_nodes
from actors.rollouts.actor_factory import ActorFactory, actor_options
from actors.rollouts.dispatcher import Dispatcher
from actors.rollouts.fleet_parts import FleetParts
from actors.rollouts.fleet_report import FleetReport, FleetStatus, RolloutInPlay
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.slot import BUSY, Slot, SlotState
from actors.rollouts.slot_loop import START_ERRORS, SlotLoop
from actors.sampling.node_samplers import NodeSamplers
from actors.settings import MANY_CALLS, FleetConfig
from environments.types import Trajectory
from policies.sampler import QueueStatus

MAX_UNDELIVERED = 16
"""Finished trajectories that wait for the stream before the actors that have played them do."""
DELIVERY_SECONDS = 0.01
"""Seconds after a delivery in which trajectories gather for the next."""
DRAIN_POLL_SECONDS = 1.0
"""Seconds between two calls for the nodes that are about to leave."""
CANCEL_SECONDS = 1.0
"""Seconds between two attempts to end what is sampled for a rollout that was cancelled."""


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class RolloutFleet:
    """Hands requests to rollout actors and puts each trajectory into the stream, exactly once per request.

    A slot takes a request only when its actor is up, so no request waits for an actor that the cluster has no
    room for. The fleet, not the rollout actor, writes to the stream: only it knows whether an actor that died
    had already delivered.

    A conversation's pair stays in its actor: its next message waits for that one. Where the pair is gone, any
    actor rebuilds it from the journals of its messages.

    Args:
        sampler: the sampling actor of this node; the fleet starts those of other nodes.
        consumer: the actor of the stream's queue, or another one: its ``put`` takes trajectories, and
            returns when there is room for the next.
    """

    def __init__(
        self,
        pair: Pair,
        sampler: ray.actor.ActorHandle,
        consumer: ray.actor.ActorHandle,
        limits: RolloutLimits,
        config: FleetConfig,
        listener: ray.actor.ActorHandle | None = None,
    ) -> None:
        options = actor_options(pair, config)
        samplers = NodeSamplers(sampler, ray.get_runtime_context().get_node_id())
        parts = FleetParts(self.record_turn)
        self._factory = ActorFactory(pair, samplers, limits, options, parts, listener, config.pairs_per_actor)
        self._consumer, self._config = consumer, config
        self._slots: dict[int, Slot] = {}
        self._dispatcher = Dispatcher(self._slots)
        self._finished: asyncio.Queue[Trajectory] = asyncio.Queue(MAX_UNDELIVERED)
        self._loops: list[asyncio.Task[None]] = []
        self._totals, self._start = FleetStatus(), time.monotonic()
        self._slot_loop = SlotLoop(self._factory, self._dispatcher, config, self._totals, self._finished)

    async def resize(self, num_actors: int) -> None:
        """Shrink at once, but for actors that are busy; or grow by an actor for each core and second."""
        if num_actors > len(self._slots):
            await self._factory.throttle.count()
        self._config.num_actors = num_actors
        if not self._loops:
            loops = (self._deliver, self._leave_draining_nodes)
            self._loops = [asyncio.create_task(each()) for each in loops]
        for slot in self._slots.values():
            if slot.index >= num_actors:
                slot.cancel()
        for index in range(num_actors):
            if index not in self._slots or self._slots[index].is_ending:
                self._open_slot(index)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests for the next free actors, urgent ones before all others."""
        for request in requests:
            self._dispatcher.submit(request)

    async def cancel(self, rollout_id: str) -> None:
        """Deliver no trajectory of this rollout, and have nothing more sampled for it.

        What its environment is doing at the moment goes on to the end of the step.
        """
        if (rollout := self._dispatcher.find(rollout_id)) is not None:
            self._dispatcher.cancel(rollout)
        while self._dispatcher.find(rollout_id) is not None:  # it may be in its environment, and sample later
            await self._factory.samplers.cancel(rollout_id)
            await asyncio.sleep(CANCEL_SECONDS)

    async def forget(self, rollout_id: str) -> None:
        """Close the environment of this rollout, if it is retained: no message comes after."""
        self._slot_loop.forget(rollout_id)

    async def end(self) -> None:
        """End the idle actors, and close the environments that they retain."""
        await self.resize(0)
        idle = (each for each in self._slots.values() if each.state is not SlotState.PLAYING)
        await asyncio.gather(*(each.task for each in idle if each.task), return_exceptions=True)

    async def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Record a turn that a rollout actor has finished; see ``Journal``."""
        self._dispatcher.journals.record(rollout_id, attempt, index, entry)
        if (rollout := self._dispatcher.find(rollout_id)) is not None:
            rollout.last_turn = time.monotonic()

    async def status(self) -> FleetStatus:
        """Return the counts.

        Raises:
            The error of a slot or of the delivery that has died: a fleet with a bug must not look idle. A
            slot whose actors do not start is only missing, as long as another one is alive.
        """
        for loop in self._loops:
            if loop.done():
                loop.result()  # raises: it has no end of its own
        self._factory.node_watch.check()
        self._factory.parts.check()
        slots = self._slots.values()
        alive = sum(not each.has_ended for each in slots)
        for slot in slots:
            if (error := slot.error) is not None and not (alive and isinstance(error, START_ERRORS)):
                raise error
        now, in_play = time.monotonic(), [each.rollout for each in slots if each.rollout is not None]
        return replace(
            self._totals,
            num_actors=alive,
            num_ready=sum(each.is_up for each in slots),
            num_waiting=self._dispatcher.num_waiting,
            num_running=sum(each.state in BUSY for each in slots),
            busy_seconds=self._totals.busy_seconds + sum(now - each.playing_since for each in in_play),
            seconds=now - self._start,
            num_warm=sum(each.pair is not None for each in slots),
            last_taken=1 + max((each.index for each in slots if each.pair or each.state in BUSY), default=-1),
        )

    async def node_sampling(self) -> list[QueueStatus]:
        """Return the counts of the sampling actors on other nodes than the first, the last ones known."""
        return await self._factory.samplers.other_statuses()

    async def report(self) -> FleetReport:
        """Report the rollouts in play, the longest without a turn first. Raises as ``status`` does."""
        status, now, slots = await self.status(), time.monotonic(), self._slots.values()
        in_play = [
            RolloutInPlay(each.rollout_id, slot.node, now - each.playing_since, now - each.last_turn)
            for slot in slots
            if (each := slot.rollout) is not None
        ]
        failures = [
            replace(slot.failure, seconds=now - slot.failure.seconds) for slot in slots if slot.failure
        ]
        options = self._factory.options
        return FleetReport(
            status=status,
            in_play=tuple(sorted(in_play, key=lambda each: -each.seconds_since_turn)),
            num_undelivered=self._finished.qsize(),
            env_class=self._factory.pair.env_class.__name__,
            needs={"CPU": options["num_cpus"], "memory": options["memory"] or 0} | options["resources"],
            failures=tuple(sorted(failures, key=lambda each: each.seconds)),
            samplers=self._factory.samplers.by_place(),
            stream=self._consumer,
        )

    # -- loops ---------------------------------------------------------------------------------------

    def _open_slot(self, index: int) -> None:
        """Put a new slot at ``index``, in place of one that ends, if there is one."""
        slot = Slot(index, self._factory, self._slots[index].failure if index in self._slots else None)
        self._slots[index] = slot
        slot.task = asyncio.create_task(self._slot_loop.run(slot))

    async def _deliver(self) -> None:
        """consumes finished trajectories · waits for room in the stream · produces trajectories there"""
        while True:
            ended = [await self._finished.get()]
            while not self._finished.empty():
                ended.append(self._finished.get_nowait())
            await self._consumer.put.remote(ended)
            await asyncio.sleep(DELIVERY_SECONDS)

    async def _leave_draining_nodes(self) -> None:
        """consumes time · waits for Ray's list of draining nodes · produces idle actors on other nodes

        An actor that plays ends its rollout.
        """
        while True:
            draining = self._factory.node_watch.draining = await asyncio.to_thread(draining_nodes)
            for slot in list(self._slots.values()):
                if slot.node in draining and slot.cancel():
                    self._open_slot(slot.index)
            await asyncio.sleep(DRAIN_POLL_SECONDS)
