"""A slot of the fleet: a place of a rollout actor, after which another one comes when it is lost.

::

    STARTING ──▶ IDLE ◀──▶ PLAYING ◀──▶ WARM      a conversation's pair stays for its next message
        ▲          ▲          ▲           │
        │          └─ CLOSING ┴───────────┘       no message comes any more (then IDLE), or another
        │                                         request needs the actor (then PLAYING)
      GONE ◀── each of the others                 the actor was lost or has to go, its pair was closed

========  =====================================================  ======  =========  =================
state     what its actor does                                    is up   may be     holds
                                                                         cancelled
========  =====================================================  ======  =========  =================
STARTING  waits for a core, room, its process, a sampling actor          yes
IDLE      waits for a request                                    yes     yes        place, node
WARM      waits for a request, with a conversation's pair        yes     yes        place, node, pair
PLAYING   plays a rollout; its result waits for delivery         yes                place, node, rollout
CLOSING   closes the environment of a pair                       yes                place, node
GONE      nothing: it has ended                                          yes
========  =====================================================  ======  =========  =================

Only the slot's own coroutine, ``SlotLoop.run``, changes its state, by the methods below. Others read it: the
``Dispatcher`` to choose who plays what; ``RolloutFleet.resize`` and ``RolloutFleet._leave_draining_nodes`` to
cancel that coroutine where it may be. From outside only ``pair.is_over`` is set, by ``Dispatcher.end_pair``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from actors.rollouts.actor_factory import ActorFactory, Place, wait_until_ready
from actors.rollouts.fleet_parts import result_of
from actors.rollouts.fleet_report import ActorFailure
from actors.rollouts.player import Attempt, RolloutResult
from actors.rollouts.requests import PendingRollout
from actors.rollouts.rollout import RolloutRequest, failed
from actors.timing import (
    ENV_CLOSE_SECONDS,
    LIMIT_GRACE_SECONDS,
    NODE_SILENCE_SECONDS,
    SAMPLER_RESTART_SECONDS,
    SLOT_ANSWER_SECONDS,
)
from environments.types import TerminationReason

logger = logging.getLogger(__name__)


class SlotState(Enum):
    """Work of the actor of a slot: see the head of this file."""

    STARTING = "starting"
    IDLE = "idle"
    PLAYING = "playing"
    WARM = "warm"
    CLOSING = "closing"
    GONE = "gone"


WAITING = {SlotState.IDLE, SlotState.WARM}
BUSY = {SlotState.PLAYING, SlotState.CLOSING}
"""States whose work must not be cancelled."""


@dataclass(slots=True)
class WarmPair:
    """A pair that waits in its actor for a message after ``rollout_id``, since a time."""

    rollout_id: str
    since: float
    is_over: bool = False
    """True when no message comes any more, so that the slot has to close it."""


@dataclass(eq=False, slots=True)
class Slot:
    """One actor at a time, and what it does. ``task`` is its coroutine.

    Args:
        index: its number. Those from the wanted number of actors on have to go.
        factory: makes its actors.
        failure: the youngest of its actors, with the time of the failure as its ``seconds``.
    """

    index: int
    factory: ActorFactory
    failure: ActorFailure | None = None
    state: SlotState = SlotState.STARTING
    place: Place | None = None
    node: str = ""
    pair: WarmPair | None = None
    rollout: PendingRollout | None = None
    has_just_answered: bool = False
    """True while it goes on at once with the actor's result in hand: until anything is waited for."""
    task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """True while it has an actor that can play, or will be able to."""
        return self.state in WAITING or self.state in BUSY

    @property
    def is_ending(self) -> bool:
        """True when it has ended, or will as soon as its pair is closed."""
        return self.task is None or self.task.done() or self.task.cancelling() > 0

    @property
    def error(self) -> BaseException | None:
        """The error that has ended it, if one has."""
        return self.task.exception() if self.task and self.task.done() and not self.task.cancelled() else None

    @property
    def has_ended(self) -> bool:
        """True when no other actor comes."""
        return self.task is not None and self.task.done()

    def cancel(self) -> bool:
        """End its coroutine, unless it is busy; return whether that will end."""
        assert self.task is not None
        return self.state not in BUSY and self.task.cancel()

    # -- for its coroutine ---------------------------------------------------------------------------

    async def start(self) -> bool:
        """Start an actor; return whether it is up, and not given up for one with more room."""
        self.state = SlotState.STARTING
        self.place = await self.factory.make()
        try:
            self.node = await wait_until_ready(self.place, self.factory.node_watch) or ""
        except RayActorError:
            is_first = self.factory.retire(self.place.shared)
            if self.place.shared.node or not is_first:  # it was up, or another slot counts it
                return False
            raise
        if self.node:
            self.place.shared.node = self.node
        else:
            self.factory.retire(self.place.shared)
        return bool(self.node)

    async def connect(self, sampler: asyncio.Task[ray.actor.ActorHandle] | None) -> bool:
        """Have the actor use the sampling actor of its node, once that has started; return whether it does.

        Args:
            sampler: its start; ``None`` where the actor has it already.
        """
        if sampler is None:
            return True
        connecting = asyncio.create_task(self._connect(sampler))
        seconds = SAMPLER_RESTART_SECONDS + SLOT_ANSWER_SECONDS
        return await self._succeeds(connecting, seconds, "A rollout actor was lost before it could sample")

    def await_request(self) -> None:
        """Be there for the next request."""
        self.state = SlotState.IDLE if self.pair is None else SlotState.WARM

    async def play(self, rollout: PendingRollout, attempt: Attempt) -> RolloutResult:
        """Have the actor play ``rollout``: its result, or a failed one where the actor can give none."""
        self.pair, self.rollout = None, rollout
        rollout.playing_since = rollout.last_turn = time.monotonic()
        try:
            assert self.place is not None
            call = result_of(self.place.run(attempt), attempt.request)
            result = await self._result_or_failure(asyncio.ensure_future(call), attempt.request)
            self.has_just_answered = True
            asyncio.get_running_loop().call_soon(setattr, self, "has_just_answered", False)
        finally:
            self.rollout = None
        if result.retained:
            self.pair = WarmPair(rollout.rollout_id, time.monotonic())
        return result

    async def close_pair(self) -> bool:
        """Close the environment of the pair, and return whether the actor can be used again."""
        self.pair, self.state = None, SlotState.CLOSING
        assert self.place is not None
        closing: asyncio.Future[bool] = asyncio.ensure_future(self.place.close_pair())
        seconds = ENV_CLOSE_SECONDS + LIMIT_GRACE_SECONDS
        return await self._succeeds(closing, seconds, "The environment of a conversation was not closed")

    def end_actor(self) -> None:
        """End what plays here, if anything does."""
        self.state, self.node, self.pair = SlotState.GONE, "", None
        if self.place is not None:
            self.factory.release(self.place)
            self.place = None

    async def responds(self) -> bool:
        """True if the actor, which is to play now, answers. Else whatever it was to play has not begun.

        Without this check a request would be tried, and could fail for good, on actors that died while they
        waited. One that goes on at once is not called: the result that it has just given is its answer.
        By way of a part, that was up to a fifth of a second ago.
        """
        self.state = SlotState.PLAYING
        if self.has_just_answered:
            return not self._silence().done()
        assert self.place is not None
        answer: asyncio.Future[str] = asyncio.ensure_future(self.place.ready())
        in_time = await self._ends_in_time(answer, SLOT_ANSWER_SECONDS)
        return in_time and answer.exception() is None and not self._silence().done()

    async def _connect(self, sampler: asyncio.Task[ray.actor.ActorHandle]) -> bool:
        assert self.place is not None
        await self.place.connect(await asyncio.shield(sampler))  # other slots wait for it, too
        return True

    async def _result_or_failure(
        self, running: asyncio.Future[RolloutResult], request: RolloutRequest
    ) -> RolloutResult:
        limit = self.factory.limits.timeout_seconds
        if await self._ends_in_time(running, limit + ENV_CLOSE_SECONDS + LIMIT_GRACE_SECONDS):
            return await running
        if self._silence().done():
            reason = TerminationReason.CRASHED
            text = f"The rollout actor's node {self.node} has not answered for {NODE_SILENCE_SECONDS} s."
        else:  # it could not even be interrupted
            reason = TerminationReason.TIMEOUT
            text = (
                f"The rollout ran longer than its limit of {limit:g} s. Nothing could interrupt it, so "
                "its process was ended, and its environment not closed."
            )
        return RolloutResult(failed(request, reason, text), usable=False)

    async def _succeeds(self, call: asyncio.Future[bool], seconds: float, failure: str) -> bool:
        """The result of a call of the actor; false, and ``failure`` in the log, if none comes in time."""
        error: object = "its actor or node does not answer"
        try:
            if await self._ends_in_time(call, seconds):
                return await call
        except RayError as died:
            error = died
        logger.warning("%s: %s", failure, error)
        return False

    async def _ends_in_time(self, call: asyncio.Future[Any], seconds: float) -> bool:
        """True if a call of the actor ends within ``seconds``, before its node is silent."""
        try:
            silence = self._silence()
            await asyncio.wait({call, silence}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return call.done()
        finally:
            call.cancel()  # what comes from it now counts no more

    def _silence(self) -> asyncio.Future[None]:
        return self.factory.node_watch.silence(self.node)
