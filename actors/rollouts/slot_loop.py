"""The coroutine of a slot: it keeps one rollout actor after the other busy, and settles what they played."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from ray.exceptions import RayActorError, RayTaskError

from actors.rollouts.actor_factory import ActorFactory
from actors.rollouts.dispatcher import Dispatcher
from actors.rollouts.fleet_report import ActorFailure, FleetStatus
from actors.rollouts.player import Attempt, PastMessage, RolloutResult
from actors.rollouts.requests import RESUMED_AFTER, PastMessages, PendingRollout
from actors.rollouts.rollout import RolloutRequest, failed
from actors.rollouts.slot import Slot
from actors.settings import FleetConfig
from environments.types import TerminationReason, Trajectory

logger = logging.getLogger(__name__)

MAX_START_FAILURES = 3
"""Actors of a slot that may fail to start, one after the other, before the fleet itself has failed."""


START_ERRORS = (RayActorError, RayTaskError)
"""Errors of an actor that does not start; the second one where a pair's process does not start in it."""


@dataclass(slots=True)
class SlotLoop:
    """Runs the slots of a fleet, whose states it changes.

    Args:
        config: how many slots there are to be, and how often a rollout is retried.
        totals: of the fleet, which are added to here.
        finished: where each trajectory is put, once.
    """

    factory: ActorFactory
    dispatcher: Dispatcher
    config: FleetConfig
    totals: FleetStatus
    finished: asyncio.Queue[Trajectory]
    _past_messages: PastMessages = field(default_factory=PastMessages)

    async def run(self, slot: Slot) -> None:
        """consumes requests · waits for room for finished trajectories · produces one trajectory per request

        One actor after the other plays them, until the slot is one too many.
        """
        num_failures = 0
        while slot.index < self.config.num_actors:
            try:
                if await slot.start():
                    num_failures = 0
                    watch, samplers = self.factory.node_watch, self.factory.samplers
                    with watch.watched(slot.node), samplers.used(slot.node) as sampler:
                        if await slot.connect(sampler):
                            await self._keep_busy(slot)
            except START_ERRORS as error:
                logger.warning("A rollout actor did not start: %s", error)
                if (num_failures := num_failures + 1) == MAX_START_FAILURES:
                    raise
            finally:
                slot.end_actor()
                self.dispatcher.notify_waiters()  # what this slot was waited for another may play

    def forget(self, rollout_id: str) -> None:
        """Close the pair after this rollout, and do not rebuild it either."""
        self._past_messages.drop(rollout_id)
        self.dispatcher.end_pair(rollout_id)

    async def _keep_busy(self, slot: Slot) -> None:
        """Play requests with the slot's actor until it is lost, or one too many, or its node leaves."""
        is_usable = True
        try:
            while is_usable and self._may_play(slot):
                slot.await_request()
                rollout = await self.dispatcher.take(slot)
                if rollout is None:  # no message comes for the pair that it retains
                    is_usable = await self._close_pair(slot)
                else:
                    is_usable = await self._try(rollout, slot)
                self.totals.num_lost += not is_usable
        finally:
            if slot.pair is not None:
                await self._close_pair(slot)

    def _may_play(self, slot: Slot) -> bool:
        """True unless the slot is one too many, or its node is about to leave."""
        is_leaving = slot.node in self.factory.node_watch.draining
        return slot.index < self.config.num_actors and not is_leaving

    async def _try(self, rollout: PendingRollout, slot: Slot) -> bool:
        """Play ``rollout`` with the slot's actor; return whether that can be used again."""
        if slot.pair is not None and slot.pair.rollout_id != rollout.after:
            is_usable = await self._close_pair(slot)
            if not is_usable or not self._may_play(slot):  # closing takes seconds
                self.dispatcher.put(rollout)
                return is_usable
        if not await slot.responds():
            self.dispatcher.put(rollout)
            return False
        start = time.monotonic()
        self.totals.waited_seconds += start - rollout.waiting_since
        result = await self._play(rollout, slot)
        self.totals.busy_seconds += time.monotonic() - start
        await self._settle(rollout, slot, result)
        return result.usable

    async def _play(self, rollout: PendingRollout, slot: Slot) -> RolloutResult:
        """The result of ``rollout``. Its pair may be retained, for as long as the request wants."""
        request = rollout.request
        history = () if slot.pair is not None else self._past_messages.before(request)
        if history is None:
            return self._lost(request)
        journals = self.dispatcher.journals
        entries = journals.open(request.rollout_id, rollout.attempt, rollout.beginning)
        self.totals.num_resumed_turns += len(entries) - len(rollout.beginning)
        name = journals.name_of(request.rollout_id)
        result = await slot.play(rollout, Attempt(request, rollout.attempt, entries, name, history))
        self.totals.num_resumed_turns += result.num_kept
        if result.retained:
            if result.turns:
                self._past_messages.retain(PastMessage(request, result.turns))
            seconds = 0.0 if rollout.is_cancelled else request.keep_seconds or 0.0
            asyncio.get_running_loop().call_later(seconds, self.dispatcher.end_pair, request.rollout_id)
        return result

    def _lost(self, request: RolloutRequest) -> RolloutResult:
        """The failure of a follow-up whose pair is gone for good."""
        env_class = self.factory.pair.env_class
        reason = "the journals of its messages are not kept any more."
        if env_class.resumes_by is None:
            reason = "its resumes_by is None."
        text = f"{env_class.__name__} cannot be rebuilt: {reason}"
        return RolloutResult(failed(request, TerminationReason.ENV_ERROR, text), usable=True, lost=True)

    async def _close_pair(self, slot: Slot) -> bool:
        self.dispatcher.notify_waiters()  # a message that has waited for this pair is for any slot now
        return await slot.close_pair()

    async def _settle(self, rollout: PendingRollout, slot: Slot, result: RolloutResult) -> None:
        """Hand over what the slot's actor has played, or let another one try again."""
        trajectory, reason = result.trajectory, result.trajectory.termination_reason
        assert reason is not None
        listener = self.factory.listener
        if result.lost and listener is not None:
            listener.on_conversation_lost.options(num_returns=0).remote(rollout.rollout_id, trajectory.error)
            rollout.is_cancelled = True  # that is its answer
        if rollout.is_cancelled:
            self.dispatcher.remove(rollout)
            return
        if reason.is_failure:
            error = trajectory.error or reason.value
            slot.failure = ActorFailure(slot.index, slot.node, rollout.rollout_id, error, time.monotonic())
            resumes_by = self.factory.pair.env_class.resumes_by
            if rollout.attempt <= self.config.retries and rollout.may_be_retried(reason, resumes_by):
                logger.warning("Rollout %s failed: %s", rollout.rollout_id, trajectory.error)
                self.totals.num_replayed_tokens += trajectory.num_sampled_tokens
                self.totals.num_retries += 1
                goes_on = reason in RESUMED_AFTER
                if resumes_by == "answers":  # else its program has had the answer that all is over
                    goes_on = reason is TerminationReason.CRASHED
                self.dispatcher.retry(rollout, slot.index, begins_anew=not goes_on)
                return
            if rollout.attempt > 1:
                trajectory.error = f"{trajectory.error}\n(after {rollout.attempt} attempts)"
        self.dispatcher.remove(rollout, result.beginnings)
        await self.finished.put(trajectory)
