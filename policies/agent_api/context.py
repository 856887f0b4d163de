"""Context of a client's message: its owner, the conversation it follows, its keys."""

from __future__ import annotations

from dataclasses import dataclass

SESSION_HEADER = "x-session-id"
"""Header by which a client names the session that its request is of."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """Key by which a request is sent again, and what it asks for."""

    key: str
    body: str = ""
    """Digest of the request: of its body and its session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestContext:
    """A message's place among others. Routes and frontends fill it in; the agent's pool reads it."""

    owner: str = ""
    """The name of the key that it came with: conversations, responses and idempotency keys belong to it."""
    session: str | None = None
    """The conversation that it goes on with, or begins."""
    after: str | None = None
    """The id of the response that it goes on from."""
    keeps_history: bool = False
    """True if a later message may find the conversation by ``history``, without a session."""
    earlier: str = ""
    """Digest of what was said before, with ``keeps_history``: see ``policies.agent_api.history``."""
    history: str = ""
    """Digest of what was said, with this message."""
    exchanges: tuple[tuple[str, str], ...] = ()
    """Messages with their answers before this one, with ``keeps_history``, where each has one."""
    has_earlier_turns: bool = False
    """True if the client has sent earlier answers too, so that its session cannot be a new one."""
    answer_id: str = ""
    """The id that its answer gets."""
    created: int = 0
    """Time of the request, in seconds of Unix time."""
    can_be_followed: bool = False
    """True if another message may come ``after`` its answer."""
    idempotency: IdempotencyKey | None = None
    """A message with the one of an earlier message gets that one's answer."""
    withdraw_key: str | None = None
    """Key by which its owner can withdraw the message."""
    may_be_recorded: bool = False
    """False if its client keeps its answer out of the recordings, or the protocol cannot say which it was."""


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """Facts about an agent that clients may know."""

    description: str
    takes_follow_ups: bool
    """True if a message can go on with a conversation."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Comes before a part of an answer: tokens that the model has read and sampled for it.

    The key of the request pays for them. Fewer than 0 give back what was paid for a try that has failed.
    """

    num_tokens: int


@dataclass(frozen=True, slots=True)
class RecordingNotice:
    """Comes before an answer where answers are recorded, and once more if its recording has failed."""

    is_recorded: bool
    """True if clients can send feedback on the answer when it has ended."""


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """Comes before an answer that an earlier request with the same idempotency key has got, or gets."""

    answer_id: str
    created: int
