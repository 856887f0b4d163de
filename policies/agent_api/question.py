"""Questions to agents: what a request wants of one, whichever protocol it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.agent_api.context import RequestContext
from policies.agent_api.history import INSTRUCTING, Turn
from policies.model_api.errors import InvalidRequestError
from policies.model_api.protocol import NO_EFFECT, ChatRequest

SAMPLING = {"temperature", "top_p", "top_k", "max_tokens", "seed"}
TAKEN = {
    *SAMPLING,
    *("model", "messages", "stream", "stream_options", "max_completion_tokens"),
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("metadata", "reasoning_effort"),
    *("store", "service_tier", "logit_bias", "modalities"),
}
"""Fields of a chat request that an agent acts on, or that it ignores. The rest is the agent's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request to an agent: its messages, of which the last is the new one, and how to sample."""

    model: str
    turns: Sequence[Turn]
    sampling: Mapping[str, Any]
    """Fields of ``SAMPLING`` that the client has set."""

    @classmethod
    def from_chat(cls, body: ChatRequest) -> Question:
        """Read a chat request. Raises ``InvalidRequestError`` for what an agent decides for itself."""
        given = body.model_dump(exclude=TAKEN, exclude_none=True)
        for name in sorted(name for name, value in given.items() if value not in NO_EFFECT.get(name, ())):
            raise InvalidRequestError(
                f"{body.model} plays with settings and tools of its own: leave {name} out.", param=name
            )
        if any(each.num_pictures for each in body.messages):
            raise InvalidRequestError(
                f"{body.model} reads text only: leave the pictures out.", param="messages"
            )
        turns = [(each.role, str(each.for_template["content"])) for each in body.messages]
        sampling = body.model_dump(include=SAMPLING, exclude_none=True)
        return cls(model=body.model, turns=turns, sampling=sampling)

    def new_message(self, context: RequestContext, instructions: str) -> str:
        """Return the one new message, behind the ``instructions`` where those are prepended.

        Raises:
            InvalidRequestError: the messages are not those of a conversation, or hold instructions.
        """
        roles = [role for role, _ in self.turns if role not in INSTRUCTING]
        orders = [text for role, text in self.turns if role in INSTRUCTING and text.strip()]
        role, message = self.turns[-1]
        if orders and instructions == "reject":
            raise InvalidRequestError(
                f"{self.model} has instructions of its own: leave out system messages, or set "
                "server.agents.instructions, which says what becomes of them.",
                param="messages",
            )
        if role != "user":
            raise InvalidRequestError(
                f"The last message is the new one, and is of {role!r}: send a user message.", param="messages"
            )
        goes_on = context.session is not None or context.after is not None
        if not goes_on and len(roles) > 1 and not (context.keeps_history and "assistant" in roles):
            raise InvalidRequestError(
                f"{self.model} takes one message at a time, and remembers earlier turns itself: send one "
                "user message, or with it all that was said. The header X-Session-Id, or "
                "previous_response_id at /v1/responses, goes on with a conversation too.",
                param="messages",
            )
        is_first = not goes_on and len(roles) == 1
        return "\n\n".join([*(orders if instructions == "prepend" and is_first else []), message])
