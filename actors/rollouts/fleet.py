"""The rollout actors as one elastic fleet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.queue import Queue

from actors.ray_tools.node_watch import NodeWatch
from actors.ray_tools.placement import EVERYWHERE, draining_nodes, has_labels, with_labels
from actors.rollouts.attempts import Attempt, WaitingAttempts
from actors.rollouts.core_places import CorePlaces
from actors.rollouts.fleet_report import ActorFailure, FleetReport, FleetStatus, RolloutInPlay
from actors.rollouts.journal import JournalStore
from actors.rollouts.kept_pairs import RESUMED_AFTER, KeptPairs
from actors.rollouts.outcome import is_there, outcome, started
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.rollout_actor import RolloutActor, RolloutResult
from actors.settings import MANY_CALLS, FleetConfig
from environments.errors import ConfigError
from environments.types import Trajectory

logger = logging.getLogger(__name__)

MAX_UNDELIVERED = 16
"""Finished trajectories that wait for the stream before the actors that have played them do."""
DRAIN_POLL_SECONDS = 1.0
"""Between two looks for nodes that are about to leave."""
CANCEL_SECONDS = 1.0
"""Between two attempts to end what is sampled for a rollout that was cancelled."""
MAX_START_FAILURES = 3
"""Actors of a slot that may fail to start, one after the other, before the fleet itself has failed."""


@dataclass(slots=True)
class InPlay:
    """A rollout that an actor plays, since a time."""

    rollout_id: str
    since: float
    turned: float
    """When its last turn ended, or its first began."""


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class RolloutFleet:
    """Hands requests to rollout actors and puts each trajectory into the stream, exactly once per request.

    A slot is the coroutine that keeps one actor busy, and puts another in its place when it is lost. It
    takes a request only when its actor is up, so no request waits for an actor that the cluster has no room
    for. The fleet, not the rollout actor, writes to the stream: only it knows whether an actor that died had
    already delivered.

    A conversation's pair stays in its actor: its next message waits for that one. Where the pair is gone, any
    actor rebuilds it from the journals of its messages.

    consumes requests · waits for room in the stream · produces one trajectory per request
    """

    def __init__(
        self,
        pair: Pair,
        sampler: ray.actor.ActorHandle,
        queue: Queue,
        limits: RolloutLimits,
        config: FleetConfig,
        listener: ray.actor.ActorHandle | None = None,
    ) -> None:
        self._pair, self._sampler, self._queue, self._listener = pair, sampler, queue, listener
        self._limits, self._config = limits, config
        self._options = actor_options(pair, config)
        self._journals = JournalStore()
        self._num_submitted = 0
        self._undelivered: set[str] = set()
        """The rollouts that were submitted, and whose trajectory is not finished."""
        self._cancelled: set[str] = set()
        """Those of them whose trajectories nobody waits for."""
        self._finished: asyncio.Queue[Trajectory] = asyncio.Queue(MAX_UNDELIVERED)
        self._delivery: asyncio.Task[None] | None = None
        self._drain_watch: asyncio.Task[None] | None = None
        self._node_watch = NodeWatch()
        self._places = CorePlaces()
        self._slots: dict[int, asyncio.Task[None]] = {}
        self._nodes: dict[int, str] = {}
        """Where the actor of a slot is, for the slots whose actors are up."""
        self._kept = KeptPairs(pair.env_class, lambda: self._attempts.look_again())
        self._attempts = WaitingAttempts(lambda: self._nodes, self._kept)
        self._draining: frozenset[str] = frozenset()
        self._playing: set[int] = set()
        """The slots that must not be cancelled: their actors play, or close an environment."""
        self._in_play: dict[int, InPlay] = {}
        """By slot."""
        self._failures: dict[int, ActorFailure] = {}
        """By slot, with the time of the failure as its ``seconds``."""
        self._start = time.monotonic()
        self._busy_seconds = self._waited_seconds = 0.0
        self._num_ready = self._num_lost = 0
        self._num_replayed_tokens = self._num_retries = self._num_resumed_turns = 0

    async def resize(self, num_actors: int) -> None:
        """Shrink at once, but for actors that still play; or grow by an actor for each core and second."""
        if num_actors > len(self._slots):
            await self._places.count()
        self._config.num_actors = num_actors
        if self._delivery is None:
            self._delivery = asyncio.create_task(self._deliver())
            self._drain_watch = asyncio.create_task(self._leave_draining_nodes())
        for index, slot in self._slots.items():
            if index >= num_actors and index not in self._playing:
                slot.cancel()
        for index in range(num_actors):
            if index not in self._slots or self._slots[index].done() or self._slots[index].cancelling():
                self._slots[index] = asyncio.create_task(self._slot(index))

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests for the next free actors, urgent ones before all others."""
        for request in requests:
            self._attempts.put(Attempt((not request.urgent, self._num_submitted), request))
            self._num_submitted += 1
            self._undelivered.add(request.rollout_id)

    async def cancel(self, rollout_id: str) -> None:
        """Deliver no trajectory of this rollout, and have nothing more sampled for it.

        What its environment is doing at the moment goes on to the end of the step.
        """
        if rollout_id in self._undelivered:
            self._cancelled.add(rollout_id)
        if self._attempts.withdraw(rollout_id):
            self._forget(rollout_id)
        while rollout_id in self._cancelled:  # it may be in its environment, and sample later
            await self._sampler.cancel.remote(rollout_id)
            await asyncio.sleep(CANCEL_SECONDS)

    async def forget(self, rollout_id: str) -> None:
        """No message comes after this rollout: close its environment, if it is kept."""
        self._kept.forget(rollout_id)

    async def end(self) -> None:
        """End the idle actors, and close the environments that they keep."""
        await self.resize(0)
        idle = [slot for index, slot in self._slots.items() if index not in self._in_play]
        await asyncio.gather(*idle, return_exceptions=True)

    async def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Keep what a rollout actor says of a turn that it has finished; see ``Journal``."""
        self._journals.record(rollout_id, attempt, index, entry)
        for each in self._in_play.values():
            if each.rollout_id == rollout_id:
                each.turned = time.monotonic()

    async def status(self) -> FleetStatus:
        """Counts.

        Raises:
            The error of a slot or of the delivery that has died: a fleet with a bug must not look idle. A
            slot whose actors do not start is only missing, as long as another one is alive.
        """
        for task in (self._delivery, self._drain_watch):
            if task is not None and task.done():
                task.result()  # raises: it has no end of its own
        self._node_watch.check()
        alive = any(not slot.done() for slot in self._slots.values())
        for slot in self._slots.values():
            error = slot.exception() if slot.done() and not slot.cancelled() else None
            if error is not None and not (alive and isinstance(error, RayActorError)):
                raise error
        now = time.monotonic()
        return FleetStatus(
            num_actors=sum(not slot.done() for slot in self._slots.values()),
            num_ready=self._num_ready,
            num_waiting=len(self._attempts),
            num_running=len(self._playing),
            num_lost=self._num_lost,
            busy_seconds=self._busy_seconds + sum(now - each.since for each in self._in_play.values()),
            seconds=now - self._start,
            num_replayed_tokens=self._num_replayed_tokens,
            waited_seconds=self._waited_seconds,
            num_retries=self._num_retries,
            num_resumed_turns=self._num_resumed_turns,
            num_kept=len(self._kept),
            last_taken=1 + max((*self._playing, *self._kept), default=-1),
        )

    async def report(self) -> FleetReport:
        """What ``status`` tells or raises, and the rollouts in play, the longest without a turn first."""
        status, now = await self.status(), time.monotonic()
        in_play = [
            RolloutInPlay(each.rollout_id, self._nodes.get(slot, ""), now - each.since, now - each.turned)
            for slot, each in self._in_play.items()
        ]
        needs = {"CPU": self._options["num_cpus"], "memory": self._options["memory"] or 0}
        return FleetReport(
            status=status,
            in_play=tuple(sorted(in_play, key=lambda each: -each.seconds_since_turn)),
            num_undelivered=self._finished.qsize(),
            env_class=self._pair.env_class.__name__,
            needs=needs | self._options["resources"],
            failures=tuple(
                replace(each, seconds=now - each.seconds)
                for each in sorted(self._failures.values(), key=lambda each: -each.seconds)
            ),
            sampler=self._sampler,
            stream=self._queue.actor,
        )

    async def _slot(self, index: int) -> None:
        num_failures = 0
        while index < self._config.num_actors:
            await self._places.take()
            labels = self._options["label_selector"] | self._node_watch.elsewhere()
            own = ray.get_runtime_context().current_actor
            actor = RolloutActor.options(**self._options | {"label_selector": labels}).remote(  # type: ignore[attr-defined]
                self._pair, self._sampler, self._limits, own, self._listener
            )
            try:
                if (node := await started(actor, self._node_watch)) is None:
                    continue
                self._nodes[index], num_failures = node, 0
                self._num_ready += 1
                try:
                    with self._node_watch.watched(node):
                        await self._keep_busy(index, actor)
                finally:
                    self._num_ready -= 1
                    self._nodes.pop(index, None)
                    self._attempts.look_again()  # what this slot was waited for another may play
                    if index in self._kept:
                        await self._kept.close(index, actor)
            except RayActorError as error:
                logger.warning("A rollout actor did not start: %s", error)
                if (num_failures := num_failures + 1) == MAX_START_FAILURES:
                    raise
            finally:
                ray.kill(actor)

    async def _keep_busy(self, index: int, actor: ray.actor.ActorHandle) -> None:
        """Play requests with ``actor`` until it is lost, or one too many, or its node is about to leave."""
        while index < self._config.num_actors and self._nodes[index] not in self._draining:
            attempt = await self._attempts.take(index)
            if attempt is not None and attempt.request.rollout_id in self._cancelled:
                self._forget(attempt.request.rollout_id)
                continue
            self._playing.add(index)
            try:
                if attempt is None:  # nobody asks for the pair that it keeps
                    is_usable = await self._kept.close(index, actor)
                else:
                    is_usable = await self._try(attempt, index, actor)
            finally:
                self._playing.discard(index)  # not before: a slot that shrinking finds idle is cancelled
            if not is_usable:
                self._num_lost += 1
                return

    async def _try(self, attempt: Attempt, index: int, actor: ray.actor.ActorHandle) -> bool:
        """Make an attempt with the actor of the slot ``index``; return whether that can be used again."""
        if not await is_there(actor, self._nodes[index], self._node_watch):
            self._attempts.put(attempt)
            return False
        request, start = attempt.request, time.monotonic()
        self._waited_seconds += start - attempt.since
        self._in_play[index] = InPlay(request.rollout_id, since=start, turned=start)
        try:
            played = await self._play(attempt, index, actor)
        finally:
            del self._in_play[index]
            self._busy_seconds += time.monotonic() - start
        if played.kept:
            self._kept.keep(index, request, played.turns)
            if request.rollout_id in self._cancelled:
                self._kept.end(request.rollout_id)
        await self._settle(attempt, index, played)
        return played.usable

    async def _settle(self, attempt: Attempt, index: int, played: RolloutResult) -> None:
        """Hand over what the actor of the slot ``index`` has played, or let another one try again."""
        trajectory, reason = played.trajectory, played.trajectory.termination_reason
        assert reason is not None
        if played.lost and self._listener is not None:
            self._listener.on_conversation_lost.options(num_returns=0).remote(
                trajectory.rollout_id, trajectory.error
            )
            self._cancelled.add(trajectory.rollout_id)  # that is its answer
        if trajectory.rollout_id in self._cancelled:
            self._forget(trajectory.rollout_id)
            return
        if reason.is_failure:
            self._failures[index] = ActorFailure(
                index,
                self._nodes.get(index, ""),
                trajectory.rollout_id,
                trajectory.error or reason.value,
                time.monotonic(),
            )
        if reason not in RESUMED_AFTER or attempt.number > self._config.retries:
            self._journals.drop(trajectory.rollout_id)
        is_last = attempt.number > self._config.retries or not self._kept.may_retry(attempt.request, reason)
        if reason.is_failure and not is_last:
            logger.warning("Rollout %s failed: %s", trajectory.rollout_id, trajectory.error)
            self._num_replayed_tokens += trajectory.num_sampled_tokens
            self._num_retries += 1
            self._attempts.put_later(attempt.again(index))
            return
        if reason.is_failure and attempt.number > 1:
            trajectory.error = f"{trajectory.error}\n(after {attempt.number} attempts)"
        self._undelivered.discard(trajectory.rollout_id)
        await self._finished.put(trajectory)

    def _forget(self, rollout_id: str) -> None:
        """End a rollout that was cancelled."""
        self._cancelled.discard(rollout_id)
        self._undelivered.discard(rollout_id)
        self._journals.drop(rollout_id)

    async def _deliver(self) -> None:
        """consumes finished trajectories · waits for room in the stream · produces trajectories there"""
        while True:
            await self._queue.put_async(await self._finished.get())

    async def _leave_draining_nodes(self) -> None:
        """consumes time · waits for Ray's list of draining nodes · produces idle actors on other nodes

        An actor that plays ends its rollout.
        """
        while True:
            self._draining = await asyncio.to_thread(draining_nodes)
            for index, slot in self._slots.items():
                is_idle = index not in self._playing and not slot.done()
                if is_idle and self._nodes.get(index) in self._draining:
                    slot.cancel()
                    self._slots[index] = asyncio.create_task(self._slot(index))
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _play(self, attempt: Attempt, index: int, actor: ray.actor.ActorHandle) -> RolloutResult:
        """What the actor of the slot ``index`` makes of an attempt."""
        request = attempt.request
        history = await self._kept.history(index, actor, request)
        if isinstance(history, RolloutResult):
            return history
        entries = self._journals.open(request.rollout_id, attempt.number)
        self._num_resumed_turns += len(entries)
        running = actor.run.remote(request, attempt.number, entries, history)
        return await outcome(running, request, self._limits, self._nodes[index], self._node_watch)


def actor_options(pair: Pair, config: FleetConfig) -> dict[str, Any]:
    """The Ray options of an actor: what its environment class needs, and what the fleet's settings say."""
    needs = pair.env_class.actor_needs
    return {
        "num_cpus": config.num_cpus_per_actor if needs.num_cpus is None else needs.num_cpus,
        "memory": needs.memory_bytes,
        "resources": config.nodes.resources | dict(needs.resources),
        "label_selector": dict(config.nodes.labels),
        "runtime_env": dict(needs.runtime_env),
        **EVERYWHERE,
    }


def check_room(options: dict[str, Any]) -> None:
    """Check that a node can hold the actors: else their rollouts would wait for ever.

    Raises:
        ConfigError: names what is needed and the most that a node has.
    """
    needed = {"CPU": options["num_cpus"], "memory": options["memory"] or 0, **options["resources"]}
    labels = options["label_selector"]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and has_labels(node, labels)]
    if any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
        return
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in needed}
    raise ConfigError(
        f"One rollout actor needs {needed} and no node of the cluster{with_labels(labels)} has that (the "
        f"most of each: {most}): lower the environment class's actor_needs or fleet.num_cpus_per_actor, or "
        "add a node."
    )
