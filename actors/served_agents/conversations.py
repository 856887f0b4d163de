"""Conversations with an agent, found by session, response or history. The fleet has their pairs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from policies.agent_api.context import RequestContext
from policies.agent_api.history import BEGINNING
from policies.model_api.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RequestError,
    no_earlier_response,
)
from policies.model_api.limits import MAX_STORED

MAX_NAME = 256
"""Characters of a session's name or of an idempotency key."""
MAX_FORGOTTEN = 100_000
"""Names of sessions that are known to be forgotten."""


class Conversation:
    """Messages of which each goes on where the one before has ended; one at a time.

    Args:
        waits: whether a second message waits its turn while one is under way, instead of being an error.
        name: that its first message gives it, by which it stays with one version of the policy.
    """

    def __init__(self, waits: bool, name: str = "") -> None:
        self.newest: str | None = None
        """The rollout of its last answer."""
        self.name = name
        self._waits = waits
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, events: asyncio.Queue[Any]) -> AsyncIterator[None]:
        """The time of one message, whose events are ``events``.

        Raises:
            ConflictError: another one is under way.
            The error among the message's events while it waits.
        """
        if self._waits:
            await self._wait(events)
        else:
            self.check_idle()
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    async def _wait(self, events: asyncio.Queue[Any]) -> None:
        turn, error = asyncio.create_task(self._turn.acquire()), asyncio.create_task(events.get())
        try:
            await asyncio.wait((turn, error), return_when=asyncio.FIRST_COMPLETED)
            if error.done():
                raise error.result()
        except BaseException:  # also if the client is gone
            if not turn.cancel():
                self._turn.release()
            raise
        finally:
            error.cancel()

    @property
    def is_busy(self) -> bool:
        """True while a message is under way."""
        return self._turn.locked()

    def check_idle(self) -> None:
        """Raise ``ConflictError`` if a message is under way."""
        if self.is_busy:
            raise ConflictError(
                "A message of this conversation is under way: wait for its answer. With "
                "server.agents.second_message=wait the server lets a second one wait.",
                code="conversation_busy",
                retry_after=1,
            )


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a conversation: after a rollout, or with ``None`` after the newest one."""

    conversation: Conversation
    rollout_id: str | None = None

    @property
    def is_newest(self) -> bool:
        """True if a message may go on from here at once."""
        return self.rollout_id == self.conversation.newest and not self.conversation.is_busy


Places = OrderedDict[str, Place]
"""Places by the name of a session, the id of a response, or the digest of a history with a rollout."""


class Conversations:
    """Conversations by their names: sessions and ids of responses, each of the key that it came with.

    Args:
        waits: as for ``Conversation``.
        replays: whether a history that no conversation has begins one.
        most: names of a kind that are kept of a key; those that were not used for the longest time go first,
            but for those with a message under way.
    """

    def __init__(self, waits: bool, most: int = MAX_STORED, replays: bool = False) -> None:
        self._waits, self._most, self._replays = waits, most, replays
        self._places: defaultdict[tuple[str, str], Places] = defaultdict(OrderedDict)
        """Places by owner and kind of name: session, response or history."""
        self._forgotten: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Sessions, by owner and name, that must not begin anew as if nothing had been said."""

    def find(self, context: RequestContext) -> Place:
        """Find the place where a message goes on: in a new conversation if it names none.

        Raises:
            RequestError: it names a response that is not kept, or two conversations.
        """
        if context.after is not None:
            if context.session is not None:
                raise InvalidRequestError(
                    "previous_response_id and a session both say which conversation goes on: send one.",
                    param="previous_response_id",
                )
            places = self._places[context.owner, "response"]
            if context.after not in places:
                if (place := self._by_history(context)) is not None:
                    return place
                raise no_earlier_response(context.after, self._most)
            places.move_to_end(context.after)
            return places[context.after]
        if context.session is None:
            if context.earlier == BEGINNING:
                return Place(Conversation(self._waits))
            if (place := self._by_history(context)) is not None:
                return place
            if self._replays and context.exchanges:
                return Place(Conversation(self._waits))
            remedy = " server.agents.unknown_history=replay begins one with it." if context.exchanges else ""
            raise lost(f"the server keeps no conversation in which this was said.{remedy}")
        check_name("The session", context.session)
        if (context.owner, context.session) in self._forgotten:
            raise lost(f"the server has forgotten this session after {self._most} newer conversations.")
        places = self._places[context.owner, "session"]
        if context.session not in places:
            self._add(context.owner, "session", context.session, Place(Conversation(self._waits)))
        places.move_to_end(context.session)
        return places[context.session]

    def _by_history(self, context: RequestContext) -> Place | None:
        """Find the newest conversation with this history that has not gone on since."""
        if context.earlier == BEGINNING:
            return None
        places = self._places[context.owner, "history"]
        found = [name for name in places if name.startswith(context.earlier)]
        if not found:
            return None
        waiting = (name for name in reversed(found) if places[name].is_newest)
        name = next(waiting, found[-1])
        places.move_to_end(name)
        return places[name]

    def advance(
        self, conversation: Conversation, rollout_id: str, context: RequestContext, history: str = BEGINNING
    ) -> None:
        """An answer has come: the next message goes on from it, or from what was said, ``history``."""
        conversation.newest = rollout_id
        # After a response a client need not send all that was said, so that its history is that of others.
        says_all = context.after is None or context.earlier != BEGINNING
        if context.keeps_history and context.session is None and says_all:
            self._add(context.owner, "history", f"{history} {rollout_id}", Place(conversation, rollout_id))
        if context.can_be_followed:
            self._add(context.owner, "response", context.answer_id, Place(conversation, rollout_id))

    def end_response(self, owner: str, response_id: str) -> str | None:
        """Let no message come after a response; return its rollout if it is its conversation's newest."""
        place = self._places[owner, "response"].pop(response_id, None)
        if place is None or place.rollout_id != place.conversation.newest:
            return None
        return place.rollout_id

    def end_session(self, owner: str, session: str) -> str | None:
        """Forget a session; return the rollout of its last answer.

        Raises:
            NotFoundError: there is none.
            ConflictError: a message of it is under way.
        """
        self._forgotten.pop((owner, session), None)
        places = self._places[owner, "session"]
        if session not in places:
            raise NotFoundError(
                f"There is no session {session!r}: no message has named it, it was closed, or {self._most} "
                "newer conversations have come since.",
                code="session_not_found",
            )
        places[session].conversation.check_idle()
        return places.pop(session).conversation.newest

    def _add(self, owner: str, kind: str, name: str, place: Place) -> None:
        places = self._places[owner, kind]
        places[name] = place
        idle = (each for each in places if each != name and not places[each].conversation.is_busy)
        for oldest in list(islice(idle, max(0, len(places) - self._most))):
            del places[oldest]
            if kind == "session":
                self._forgotten[owner, oldest] = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)


def check_single(context: RequestContext, env_class: str) -> None:
    """Raise ``RequestError`` for a message that goes on, for an environment that takes one message only."""
    if context.after is not None:
        given = f"previous_response_id={context.after!r}"
    elif context.session is not None:
        given = "a session"
    elif context.earlier != BEGINNING:
        given = "earlier messages"
    else:
        return
    raise InvalidRequestError(
        f"This agent answers single messages, and the request has {given}: leave it out, or write "
        f"{env_class}.follow_up(message), which says how its environment goes on.",
        param=None if context.after is None else "previous_response_id",
        code="follow_up_not_supported",
    )


def check_name(kind: str, name: str) -> None:
    """Raise ``RequestError`` for a name that a header cannot mean."""
    if not 0 < len(name) <= MAX_NAME:
        raise InvalidRequestError(f"{kind} has a name of {len(name)} characters: send 1 to {MAX_NAME}.")


def lost(why: str) -> RequestError:
    """The error for a message whose conversation cannot go on."""
    return ConflictError(
        f"The world of this conversation is gone: {why} Start a new conversation, without "
        "previous_response_id or with another session.",
        code="conversation_lost",
    )
