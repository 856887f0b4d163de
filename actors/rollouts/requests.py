"""Records of requests: rollouts under way, and past messages, from which a conversation is rebuilt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from actors.rollouts.journal import MAX_STORE_BYTES
from actors.rollouts.player import PastMessage
from actors.rollouts.rollout import RolloutRequest
from environments.types import TerminationReason

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0
RESUMED_AFTER = {TerminationReason.CRASHED, TerminationReason.SAMPLER_ERROR}
"""Failures below the agent and the environment: an episode goes on after its last finished turn."""


@dataclass(eq=False, slots=True)
class PendingRollout:
    """A rollout from its request to its delivery. One that is tried again goes before all that came later."""

    request: RolloutRequest
    position: tuple[bool, int] = (True, 0)
    """Place in the line: (False for an urgent one, a number that counts up)."""
    attempt: int = 1
    tried_by: set[int] = field(default_factory=set)
    """Numbers of the slots whose actors have failed at it."""
    is_cancelled: bool = False
    """True when nobody waits for its trajectory."""
    waiting_since: float = 0.0
    playing_since: float = 0.0
    last_turn: float = 0.0
    """Time when its last turn ended, or its first began."""
    beginning: tuple[bytes, ...] = ()
    """Journal of the turns that it shares with the rollout that it forks from."""

    @property
    def rollout_id(self) -> str:
        return self.request.rollout_id

    @property
    def after(self) -> str | None:
        """The rollout that it goes on from, if it is a follow-up."""
        return self.request.after

    def begin_with(self, beginnings: Sequence[tuple[bytes, ...]]) -> None:
        """Begin with the journal that its parent has left for it, or with the task if that has left none."""
        fork = self.request.fork
        assert fork is not None, "only forks begin with turns of another rollout"
        self.beginning = beginnings[fork.number] if beginnings else ()
        self.request = replace(self.request, fork=replace(fork, num_turns=len(self.beginning)))

    def may_be_tried_by(self, slot: int, others: Collection[int]) -> bool:
        """True if the actor of ``slot`` has not failed at it, or those of all ``others`` have too."""
        return slot not in self.tried_by or self.tried_by.issuperset(others)

    def may_be_retried(self, reason: TerminationReason, resumes_by: str | None) -> bool:
        """True if another actor could do better. False where a world has failed that cannot be rebuilt."""
        return self.after is None or resumes_by is not None or reason in RESUMED_AFTER


def pause_before(attempt: int) -> float:
    """Seconds before an attempt, of which the first is 1: each pause is twice as long."""
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 2, 20)) if attempt > 1 else 0.0


class PastMessages:
    """The finished messages of conversations whose environments can be rebuilt; the oldest go first.

    Args:
        max_bytes: of all their journals together.
    """

    def __init__(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._messages: OrderedDict[str, PastMessage] = OrderedDict()

    def retain(self, message: PastMessage) -> None:
        """Retain ``message``, which has ended."""
        self._messages[message.request.rollout_id] = message
        self._num_bytes += _num_bytes(message)
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._messages)))

    def drop(self, rollout_id: str) -> None:
        """Drop this message, if it is there."""
        if (message := self._messages.pop(rollout_id, None)) is not None:
            self._num_bytes -= _num_bytes(message)

    def before(self, request: RolloutRequest) -> tuple[PastMessage, ...] | None:
        """All messages before ``request``, the first one first; ``None`` if one of them is not there."""
        messages: list[PastMessage] = []
        while request.after is not None:
            if request.after not in self._messages:
                return None
            self._messages.move_to_end(request.after)
            messages.append(self._messages[request.after])
            request = messages[-1].request
        return tuple(reversed(messages))


def _num_bytes(message: PastMessage) -> int:
    follow_up = message.request.follow_up
    return sum(map(len, message.turns)) + (len(follow_up.message) if follow_up else 0)
