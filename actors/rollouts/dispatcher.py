"""The rollouts under way, in their order, and which slot plays which of them."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from actors.rollouts.journal import JournalStore
from actors.rollouts.requests import PendingRollout, pause_before
from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.slot import WAITING, Slot


def choose_rollout(
    waiting: Iterable[PendingRollout], slot: Slot, slots: Collection[Slot]
) -> PendingRollout | None:
    """The rollout that ``slot`` plays next: the first one that it has not failed at, or that all have.

    Args:
        waiting: in their order.
        slots: all of the fleet.
    """
    others: set[int] | None = None
    for rollout in waiting:
        if slot.pair is None and rollout.after is None and slot.index not in rollout.tried_by:
            return rollout  # mostly: what the other slots do takes as long to find out as there are slots
        if others is None:
            others = {each.index for each in slots if each.is_up}
        if rollout.may_be_tried_by(slot.index, others) and _suits(slot, rollout, slots, others):
            return rollout
    return None


def _suits(slot: Slot, rollout: PendingRollout, slots: Collection[Slot], others: Collection[int]) -> bool:
    """True for the one idle slot that is to play ``rollout``.

    A follow-up waits for its pair. Anything else displaces a pair only if no idle slot is without one, and
    then the one that has waited longest.
    """
    if rollout.after is not None and (holder := slot_with_pair(rollout.after, slots)) is not None:
        return holder is slot
    if slot.pair is None:
        return True
    since = slot.pair.since
    idle = (each for each in slots if each.state in WAITING and each is not slot)
    able = (each for each in idle if rollout.may_be_tried_by(each.index, others))
    return all(each.pair is not None and each.pair.since > since for each in able)


def slot_with_pair(rollout_id: str, slots: Iterable[Slot]) -> Slot | None:
    """The slot that retains the pair which has played ``rollout_id``, if one does."""
    return next((each for each in slots if each.pair and each.pair.rollout_id == rollout_id), None)


class Dispatcher:
    """Holds each rollout from its request to its delivery; ``take`` waits for one that a slot may play.

    It reads the slots, and changes none but for ``pair.is_over``.

    Args:
        slots: by their numbers; they come and go.
    """

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        self._slots = slots
        self.journals = JournalStore()
        self._pending: dict[str, PendingRollout] = {}
        self._waiting: list[PendingRollout] = []
        self._forks: dict[str, list[PendingRollout]] = {}
        """Rollouts that begin when another one has ended, by its id."""
        self._num_submitted = self._num_pausing = 0
        self._has_conversations = False
        """True once a request wants its pair to be retained: only then slots have pairs."""
        self._takers: list[asyncio.Future[None]] = []

    @property
    def num_waiting(self) -> int:
        """Rollouts that wait for an actor, or for the end of a pause."""
        return len(self._waiting) + self._num_pausing

    def submit(self, request: RolloutRequest) -> None:
        """Let a new rollout wait for an actor, an urgent one first; a fork waits for its parent before."""
        rollout = PendingRollout(request, (not request.urgent, self._num_submitted))
        rollout.waiting_since = time.monotonic()
        self._num_submitted += 1
        self._has_conversations |= request.keep_seconds is not None
        self._pending[request.rollout_id] = rollout
        if request.fork is not None and request.fork.parent in self._pending:
            self._forks.setdefault(request.fork.parent, []).append(rollout)
        else:
            self.put(rollout)

    def find(self, rollout_id: str) -> PendingRollout | None:
        """The rollout, unless it has been delivered or removed."""
        return self._pending.get(rollout_id)

    def put(self, rollout: PendingRollout) -> None:
        """Let ``rollout`` wait for an actor, unless it was cancelled."""
        if rollout.is_cancelled:
            self.remove(rollout)
            return
        bisect.insort(self._waiting, rollout, key=lambda each: each.position)
        self.notify_waiters()

    def retry(self, rollout: PendingRollout, slot: int, begins_anew: bool = True) -> None:
        """Put ``rollout`` again, after the pause that a failure of the actor of ``slot`` is followed by.

        One that ``begins_anew`` has no use for the turns that are finished.
        """
        if begins_anew:
            self.journals.drop(rollout.rollout_id)
        rollout.attempt += 1
        rollout.tried_by.add(slot)
        self._num_pausing += 1
        asyncio.get_running_loop().call_later(pause_before(rollout.attempt), self._end_pause, rollout)

    def cancel(self, rollout: PendingRollout) -> None:
        """Let nobody play ``rollout`` any more: if it waits it is removed, else when it would wait again."""
        rollout.is_cancelled = True
        if rollout in self._waiting:
            self._waiting.remove(rollout)
            self.remove(rollout)

    def remove(self, rollout: PendingRollout, beginnings: Sequence[tuple[bytes, ...]] = ()) -> None:
        """Forget a rollout that is delivered, or that nobody waits for, and let its forks wait for an actor.

        Args:
            beginnings: the turns that each of them shares with it.
        """
        self._pending.pop(rollout.rollout_id, None)
        self.journals.drop(rollout.rollout_id)
        for fork in self._forks.pop(rollout.rollout_id, ()):
            fork.begin_with(beginnings)
            fork.waiting_since = time.monotonic()
            self.put(fork)

    def notify_waiters(self) -> None:
        """Let each ``take`` choose anew: other rollouts, slots or pairs are there."""
        for taker in self._takers:
            if not taker.done():
                taker.set_result(None)
        self._takers.clear()

    def end_pair(self, rollout_id: str) -> None:
        """Have the pair after ``rollout_id`` closed, if it is still retained: no message comes any more."""
        if (slot := slot_with_pair(rollout_id, self._slots.values())) is not None and slot.pair is not None:
            slot.pair.is_over = True
            self.notify_waiters()

    async def take(self, slot: Slot) -> PendingRollout | None:
        """The next rollout for ``slot``, once there is one; ``None`` where its pair has to be closed."""
        while (rollout := choose_rollout(self._waiting, slot, self._slots.values())) is None:
            if slot.pair is not None and slot.pair.is_over:
                return None
            taker = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            await taker
        self._waiting.remove(rollout)
        is_of_interest = self._waiting and self._has_conversations
        if is_of_interest and any(each.pair is not None for each in self._slots.values()):
            self.notify_waiters()  # what was left to this slot is for another now
        return rollout

    def _end_pause(self, rollout: PendingRollout) -> None:
        self._num_pausing -= 1
        rollout.waiting_since = time.monotonic()
        self.put(rollout)
