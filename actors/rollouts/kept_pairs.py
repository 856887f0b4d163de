"""What a fleet keeps of conversations: which rollout actor has whose pair, and what rebuilds a lost one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from actors.rollouts.journal import MAX_STORE_BYTES
from actors.rollouts.rollout import RolloutRequest, failed
from actors.rollouts.rollout_actor import CLOSE_SECONDS, GRACE_SECONDS, PastMessage, RolloutResult
from environments.base import BaseEnv
from environments.types import TerminationReason

logger = logging.getLogger(__name__)

RESUMED_AFTER = {TerminationReason.CRASHED, TerminationReason.SAMPLER_ERROR}
"""Failures below the agent and the environment: an episode goes on after its last finished turn."""


@dataclass(slots=True)
class Kept:
    """A pair that waits in its actor for a message after ``rollout_id``, since a time."""

    rollout_id: str
    since: float
    is_over: bool = False
    """Whether nobody asks for it any more, so that it has to be given back."""


class KeptPairs:
    """The slots whose actors keep a pair, one each. Other work goes to idle slots without one.

    In training nothing is kept.

    Args:
        env_class: of the pairs.
        look_again: called when a pair has to go, so that its slot closes it.
    """

    def __init__(self, env_class: type[BaseEnv], look_again: Callable[[], None]) -> None:
        self._env_class, self._look_again = env_class, look_again
        self._kept: dict[int, Kept] = {}
        self._histories = Histories()

    def __contains__(self, slot: int) -> bool:
        return slot in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def keep(self, slot: int, request: RolloutRequest, turns: tuple[bytes, ...]) -> None:
        """The actor of ``slot`` keeps the pair that has played ``request``, for as long as that says.

        ``turns`` are the journal of it, if the pair can be rebuilt.
        """
        self._kept[slot] = Kept(request.rollout_id, time.monotonic())
        if turns:
            self._histories.keep(PastMessage(request, turns))
        seconds = request.keep_seconds or 0.0
        asyncio.get_running_loop().call_later(seconds, self.end, request.rollout_id)

    def end(self, rollout_id: str) -> None:
        """Nobody asks for the pair after ``rollout_id`` any more, if it is still kept."""
        if (slot := self._home(rollout_id)) is not None:
            self._kept[slot].is_over = True
            self._look_again()

    def forget(self, rollout_id: str) -> None:
        """``end`` it, and do not rebuild it either."""
        self._histories.drop(rollout_id)
        self.end(rollout_id)

    async def close(self, slot: int, actor: ray.actor.ActorHandle) -> bool:
        """Close the environment that the slot's actor keeps; return whether the actor can be used again."""
        del self._kept[slot]
        self._look_again()  # a message that has waited for this pair is for any slot now
        try:
            return await asyncio.wait_for(actor.close_kept.remote(), CLOSE_SECONDS + GRACE_SECONDS)
        except (TimeoutError, RayError) as error:
            logger.warning("The environment of a conversation was not closed: %r", error)
            return False

    async def history(
        self, slot: int, actor: ray.actor.ActorHandle, request: RolloutRequest
    ) -> tuple[PastMessage, ...] | RolloutResult:
        """What the slot's actor has to repeat before it plays ``request``, or why it cannot play.

        Nothing where it keeps the pair that ``request`` goes on with. It keeps none afterwards.
        """
        if self.has_pair_of(slot, request):
            del self._kept[slot]
            return ()
        if slot in self._kept and not await self.close(slot, actor):
            text = "Its actor could not close the environment of another conversation."
            return RolloutResult(failed(request, TerminationReason.CRASHED, text), usable=False)
        history = self._histories.before(request)
        if history is not None:
            return history
        reason = "the journals of its messages are not kept any more."
        if self._env_class.resumes_by is None:
            reason = "its resumes_by is None."
        text = f"{self._env_class.__name__} cannot be rebuilt: {reason}"
        return RolloutResult(failed(request, TerminationReason.ENV_ERROR, text), usable=True, lost=True)

    def is_over(self, slot: int) -> bool:
        """Whether the pair of ``slot`` has to be given back."""
        return slot in self._kept and self._kept[slot].is_over

    def may_retry(self, request: RolloutRequest, reason: TerminationReason) -> bool:
        """Whether another actor could do better: not where a world has failed that cannot be rebuilt."""
        cannot_be_rebuilt = request.follow_up is not None and self._env_class.resumes_by is None
        return not cannot_be_rebuilt or reason in RESUMED_AFTER

    def has_pair_of(self, slot: int, request: RolloutRequest) -> bool:
        """Whether the actor of ``slot`` keeps the pair that ``request`` goes on with."""
        return request.follow_up is not None and self._home(request.follow_up.after) == slot

    def may_play(self, slot: int, request: RolloutRequest, rivals: Iterable[int]) -> bool:
        """Whether ``slot`` is the one for ``request``.

        A follow-up waits for its pair. Anything else makes a pair go only if no rival is without one, and
        then the one that has waited longest.

        Args:
            rivals: the other idle slots that could play it.
        """
        if request.follow_up is not None and (home := self._home(request.follow_up.after)) is not None:
            return home == slot
        if slot not in self._kept:
            return True
        since = self._kept[slot].since
        return all(rival in self._kept and self._kept[rival].since > since for rival in rivals)

    def _home(self, rollout_id: str) -> int | None:
        return next((slot for slot, kept in self._kept.items() if kept.rollout_id == rollout_id), None)


class Histories:
    """The finished messages of conversations whose environments can be rebuilt; the oldest go first.

    Args:
        max_bytes: of all their journals together.
    """

    def __init__(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._messages: OrderedDict[str, PastMessage] = OrderedDict()

    def keep(self, message: PastMessage) -> None:
        """Keep ``message``, which has ended."""
        self._messages[message.request.rollout_id] = message
        self._num_bytes += _num_bytes(message)
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._messages)))

    def drop(self, rollout_id: str) -> None:
        """Keep this message no more, if it is kept."""
        if (message := self._messages.pop(rollout_id, None)) is not None:
            self._num_bytes -= _num_bytes(message)

    def before(self, request: RolloutRequest) -> tuple[PastMessage, ...] | None:
        """All messages before ``request``, the first one first; ``None`` if one of them is not kept."""
        messages: list[PastMessage] = []
        while request.follow_up is not None:
            if request.follow_up.after not in self._messages:
                return None
            self._messages.move_to_end(request.follow_up.after)
            messages.append(self._messages[request.follow_up.after])
            request = messages[-1].request
        return tuple(reversed(messages))


def _num_bytes(message: PastMessage) -> int:
    follow_up = message.request.follow_up
    return sum(map(len, message.turns)) + (len(follow_up.message) if follow_up else 0)
