"""Anthropic's messages for a policy, whose tools its client runs.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from policies.model_api.dialects.base import (
    CALL,
    CHAT_PREFIX,
    TEXT,
    THOUGHT,
    ChatReader,
    Dialect,
    Draft,
    Json,
    read,
)
from policies.model_api.dialects.errors import anthropic_error
from policies.model_api.dialects.messages_request import MessagesRequest
from policies.model_api.protocol import ChatRequest

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's reasons of an answer's end, by OpenAI's."""
DELTAS = {
    THOUGHT: ("thinking_delta", "thinking"),
    TEXT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}
"""Type of a delta and the field with its text, by the kind of its block."""
SIGNATURE = "unsigned"
"""Signature of a thought: nobody checks it, but some clients send a thought back only if it has one."""


class Messages(Dialect):
    """A request of this API. Raises ``InvalidRequestError`` for a body that cannot be read."""

    terminator = None
    id_prefix = "msg_"

    def __init__(self, body: Json, chats: ChatReader | None = None) -> None:
        super().__init__(body, chats)
        self.body, self.dropped = read(MessagesRequest, body)
        self._draft = MessageDraft(self.body.model)

    def chat_request(self) -> ChatRequest:
        body = self.body
        parts = [part.for_chat() for part in (body.tool_choice, body.thinking, body.output_config) if part]
        return self._chats.read_fields(
            {
                "messages": body.chat_messages(),
                "tools": [tool.for_chat() for tool in body.tools or ()] or None,
                "stop": body.stop_sequences,
                # Clients have to send max_tokens, and send what the largest models have.
                "cap_max_tokens": True,
                # An answer that the client has begun is gone on with.
                "continue_final_message": True if body.messages[-1].role == "assistant" else None,
                # A stream begins with the number of the prompt's tokens, which the ids show.
                "return_token_ids": True if body.stream else None,
                **{name: value for part in parts for name, value in part.items()},
                **body.model_dump(
                    include={
                        *("model", "max_tokens", "temperature", "top_p", "top_k", "seed"),
                        *("stream", "policy_version"),
                    }
                ),
            }
        )

    error = staticmethod(anthropic_error)


def count_request(body: Json) -> ChatRequest:
    """The request whose prompt ``POST /v1/messages/count_tokens`` counts. Raises ``RequestError``."""
    return Messages({"max_tokens": 1, **body}).chat_request()


class MessageDraft(Draft):
    """A message that is being made. ``policy_version`` is Troupe's."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._block: Json = {}
        self.content: list[Json] = []
        self.response: Json = {
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self.content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, part: Json) -> Iterator[Json]:
        number = str(part["id"]).removeprefix(CHAT_PREFIX)
        num_prompt_tokens = len(part.get("prompt_token_ids") or ())
        self.response = {
            "id": f"{Messages.id_prefix}{number}",
            **self.response,
            "usage": _usage(num_prompt_tokens, 0),
            "policy_version": self.version,
        }
        begun = {**self.response, "content": []}
        own = {"policy_version": self.version, **self.recorded}
        yield {"type": "message_start", "message": begun, **own}

    def begin_block(self, kind: str, call: Json) -> Iterator[Json]:
        if kind == THOUGHT:
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == TEXT:
            self._block = {"type": "text", "text": ""}
        else:
            named = {"id": call["id"], "name": call["function"]["name"]}
            self._block = {"type": "tool_use", **named, "input": {}}
        yield {"type": "content_block_start", "index": len(self.content), "content_block": self._block}

    def grow_block(self, kind: str, text: str) -> Iterator[Json]:
        if text:
            delta_type, field = DELTAS[kind]
            delta = {"type": delta_type, field: text}
            yield {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def end_block(self, kind: str, is_whole: bool) -> Iterator[Json]:
        name = {THOUGHT: "thinking", TEXT: "text", CALL: "input"}[kind]
        value = _arguments(self.text) if kind == CALL else self.text
        if kind == THOUGHT:
            self._block = {**self._block, "signature": SIGNATURE}
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": len(self.content), "delta": delta}
        yield {"type": "content_block_stop", "index": len(self.content)}
        self.content.append({**self._block, name: value})

    def end(self) -> Iterator[Json]:
        yield from self.close(self.finish_reason != "length")
        ended = {
            "stop_reason": "stop_sequence" if self.stop is not None else STOP_REASONS[self.finish_reason],
            "stop_sequence": self.stop,
        }
        usage = _usage(self.usage["prompt_tokens"], self.usage["completion_tokens"])
        self.response |= {**ended, "usage": usage, "policy_version": self.version, **self.recorded}
        yield {"type": "message_delta", "delta": ended, "usage": usage, **self.recorded}
        yield {"type": "message_stop"}


def _arguments(text: str) -> Json:
    """The arguments of a call; none where it was cut off."""
    try:
        return dict(json.loads(text or "{}"))
    except (ValueError, TypeError):
        return {}


def _usage(num_read: int, num_sampled: int) -> Json:
    return {
        "input_tokens": num_read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_sampled,
    }
