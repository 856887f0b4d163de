"""Messages under way: how many there may be, the events of each, and how one is withdrawn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from environments.types import StepEvent, Trajectory
from policies.agent_api.context import RequestContext
from policies.model_api.errors import ConflictError, RequestError

MAX_WAITING_PER_ACTOR = 16
"""Messages that may be in play or wait, for each rollout actor: more are sent away."""

Event = StepEvent | Trajectory | Exception
"""Events of an episode, in their order."""
Events = asyncio.Queue[Event]


class Messages:
    """The messages that are in play or wait, each by its rollout.

    Args:
        num_actors: rollout actors that there may be.
    """

    def __init__(self, num_actors: int) -> None:
        self._num_actors = num_actors
        self._numbers = itertools.count()
        self._events: dict[str, Events] = {}
        self._rollouts: dict[tuple[str, str], str] = {}
        """The rollout of each message by its owner and its key to withdraw it."""

    @contextmanager
    def begin(self, context: RequestContext) -> Iterator[tuple[str, Events]]:
        """A new rollout's id and its events, while the block lasts. Raises ``RequestError`` (429)."""
        most = MAX_WAITING_PER_ACTOR * self._num_actors
        if len(self._events) >= most:
            raise RequestError(f"{most} messages are in play or wait already: try again later.", status=429)
        rollout_id = f"{next(self._numbers):08d}/0000"
        events = self._events[rollout_id] = Events()
        key = None if context.withdraw_key is None else (context.owner, context.withdraw_key)
        if key is not None:
            self._rollouts[key] = rollout_id
        try:
            yield rollout_id, events
        finally:
            del self._events[rollout_id]
            if key is not None:
                del self._rollouts[key]

    def add(self, rollout_id: str, event: Event) -> None:
        """Take an event of a rollout, unless its client has gone."""
        if rollout_id in self._events:
            self._events[rollout_id].put_nowait(event)

    def fail(self, error: Exception) -> None:
        """End all messages by ``error``."""
        for rollout_id in self._events:
            self.add(rollout_id, error)

    def withdraw(self, owner: str, key: str) -> bool:
        """End the episode of a message, or take it back if it waits; return whether it had not ended."""
        if not self.is_under_way(owner, key):
            return False
        self.add(self._rollouts[owner, key], ConflictError("The message was withdrawn.", code="withdrawn"))
        return True

    def is_under_way(self, owner: str, key: str) -> bool:
        """Return whether the message that can be withdrawn by ``key`` waits or is played."""
        return (owner, key) in self._rollouts
