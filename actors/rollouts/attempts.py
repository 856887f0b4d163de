"""The rollout requests of the fleet that wait for an actor, and who may take which of them."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from actors.rollouts.kept_pairs import KeptPairs
from actors.rollouts.rollout import RolloutRequest

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0


def pause_before(number: int) -> float:
    """Seconds before the attempt ``number``, of which the first is 1: each pause is twice as long."""
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(number - 2, 20)) if number > 1 else 0.0


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """A try at a request. A request that is tried again goes before all that came after it."""

    position: tuple[bool, int]
    """Whether it can wait for the urgent ones, and when it was submitted."""
    request: RolloutRequest = field(compare=False)
    number: int = field(default=1, compare=False)
    tried_by: frozenset[int] = field(default=frozenset(), compare=False)
    """The slots whose actors have failed at it."""
    since: float = field(default_factory=time.monotonic, compare=False)
    """When it began to wait for an actor."""

    def may_be_tried_by(self, slot: int, others: Collection[int]) -> bool:
        """Whether the actor of ``slot`` has not failed at it, or those of all ``others`` have too."""
        return slot not in self.tried_by or self.tried_by.issuperset(others)

    def again(self, slot: int) -> Attempt:
        """The next attempt, after the actor of ``slot`` has failed."""
        tried_by = self.tried_by | {slot}
        return replace(self, number=self.number + 1, tried_by=tried_by)


def choose_attempt(
    waiting: Collection[Attempt], slot: int, others: Collection[int], kept: KeptPairs, idle: Collection[int]
) -> Attempt | None:
    """The attempt that ``slot`` plays next: the first one that it has not failed at, or that all have.

    Args:
        waiting: in their order.
        others: slots that can play too.
        kept: the pairs that wait for a follow-up; a slot with one leaves other attempts to the ``idle`` ones.
    """
    for attempt in waiting:
        rivals = (each for each in idle if each != slot and attempt.may_be_tried_by(each, others))
        if attempt.may_be_tried_by(slot, others) and kept.may_play(slot, attempt.request, rivals):
            return attempt
    return None


class WaitingAttempts:
    """Attempts in their order; ``take`` waits for one that the slot may play.

    Args:
        slots: tells which slots can play at the moment.
        kept: the pairs that wait for a follow-up.
    """

    def __init__(self, slots: Callable[[], Collection[int]], kept: KeptPairs) -> None:
        self._slots, self._kept = slots, kept
        self._waiting: list[Attempt] = []
        self._idle: set[int] = set()
        """The slots that are in ``take``."""
        self._num_pausing = 0
        self._takers: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._waiting) + self._num_pausing

    def put(self, attempt: Attempt) -> None:
        """Let ``attempt`` wait for an actor from now on."""
        bisect.insort(self._waiting, attempt)
        self.look_again()

    def put_later(self, attempt: Attempt) -> None:
        """``put``, after the pause that a failure is followed by."""
        self._num_pausing += 1
        asyncio.get_running_loop().call_later(pause_before(attempt.number), self._end_pause, attempt)

    def withdraw(self, rollout_id: str) -> bool:
        """Let no actor take the attempt at a rollout; return whether one was waiting."""
        left = [each for each in self._waiting if each.request.rollout_id != rollout_id]
        was_waiting, self._waiting = len(left) < len(self._waiting), left
        return was_waiting

    def look_again(self) -> None:
        """Wake who waits in ``take``: other attempts or other slots are there."""
        for taker in self._takers:
            if not taker.done():
                taker.set_result(None)
        self._takers.clear()

    async def take(self, slot: int) -> Attempt | None:
        """The next attempt for ``slot``, once there is one. ``None``: the pair that it keeps has to go."""
        self._idle.add(slot)
        try:
            while (attempt := self._choose(slot)) is None:
                if self._kept.is_over(slot):
                    return None
                taker = asyncio.get_running_loop().create_future()
                self._takers.append(taker)
                await taker
        finally:
            self._idle.discard(slot)
        self._waiting.remove(attempt)
        if self._kept and self._waiting:
            self.look_again()  # what was left to this slot is for another now
        return attempt

    def _choose(self, slot: int) -> Attempt | None:
        return choose_attempt(self._waiting, slot, self._slots(), self._kept, self._idle)

    def _end_pause(self, attempt: Attempt) -> None:
        self._num_pausing -= 1
        self.put(replace(attempt, since=time.monotonic()))
