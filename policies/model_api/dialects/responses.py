"""OpenAI's Responses API for a policy, whose tools its client runs.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from policies.model_api.dialects.base import CHAT_PREFIX, ChatReader, Dialect, Json, read
from policies.model_api.dialects.errors import openai_error, renamed
from policies.model_api.dialects.responses_draft import REPEATED, ResponseDraft, usage_of
from policies.model_api.dialects.responses_request import (
    SUMMARY,
    CompactRequest,
    Conversation,
    PolicyResponses,
    messages_of,
)
from policies.model_api.errors import InvalidRequestError, no_earlier_response, request_error, why_not_kept
from policies.model_api.limits import MAX_STORED
from policies.model_api.messages import ChatMessage
from policies.model_api.protocol import ChatRequest

UNIQUE_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names that are no words, so that they are meant wherever they stand."""
NAMES = {"messages": "input", **UNIQUE_NAMES}
"""Fields of this API by those of the chat request, which errors of the engine's side name."""
TOOL: Json = {"description": None, "parameters": None, "strict": None}
"""Fields that each tool of a response has."""

SUM_UP = (
    "Sum our conversation up, so that you can go on with it from the summary alone: what was asked for, what "
    "was done, found and decided, all names, numbers and texts that are needed again, and what is left. "
    "Write nothing but the summary."
)


def responses_error(error: Exception) -> tuple[int, Json]:
    """Status and body of a failure, which names the field as the client knows it."""
    known = request_error(error)
    status, body = openai_error(known)
    name, dot, rest = (known.param or "").partition(".")
    message = renamed(known.message, UNIQUE_NAMES)
    place = {"param": NAMES[name] + dot + rest} if name in NAMES else {}
    return status, {"error": {**body["error"], **place, "message": message}}


class Responses(Dialect):
    """A request of this API. One that names stored responses needs ``follow`` before anything else.

    Raises:
        InvalidRequestError: the body cannot be read.
    """

    id_prefix = "resp_"
    _draft: _Draft

    def __init__(self, body: Json, chats: ChatReader | None = None) -> None:
        super().__init__(body, chats)
        self.body, dropped = read(PolicyResponses, body)
        self.dropped = tuple(sorted({*dropped, *self.body.ignored()}))
        self._earlier: Sequence[Json] | None = None if self.body.previous_response_id else ()
        self._items = self.body.items()
        """Items of the request; those that were followed stand in the places where they are named."""
        self._draft = _Draft(body)

    @property
    def is_stored(self) -> bool:
        """True if the client may fetch the response again, and go on from it."""
        return self.body.store is not False

    @property
    def follows(self) -> str | None:
        """Id of the stored response that ``follow`` needs next, if it needs one.

        Of items that are only named it is the last one's: its conversation has those before it, too.
        """
        if self._earlier is None:
            return self.body.previous_response_id
        missing = self._missing()
        # An item's id is its response's between three letters at most and three digits.
        return f"resp_{missing[-1].partition('_')[2][:-3]}" if missing else None

    def follow(self, conversation: Sequence[Json] | None) -> None:
        """Go on from the response that ``follows`` names, whose ``conversation`` this is.

        Raises:
            InvalidRequestError: it is not kept, or has no item of the name that is sought in it.
        """
        if is_earlier := self._earlier is None:
            if conversation is None:
                raise no_earlier_response(str(self.body.previous_response_id), MAX_STORED)
            self._earlier = conversation
        missing, known = self._missing(), {item["id"]: item for item in conversation or () if "id" in item}
        self._items = [known.get(each.get("id"), each) if _is_name(each) else each for each in self._items]
        if not is_earlier and missing == self._missing():
            raise _no_item(missing[-1])

    def _missing(self) -> list[str]:
        """Names of items that are not known yet."""
        return [each["id"] for each in self._items if _is_name(each)]

    @property
    def response_id(self) -> str:
        """Id of the response, once it has begun."""
        return str(self._draft.response["id"])

    def conversation(self) -> list[Json]:
        """All items up to the end of the answer, which is complete."""
        return [*(self._earlier or ()), *self._items, *self._draft.output]

    def prepared(self, version: int = 0) -> list[Json]:
        """The parts of a response without an answer, to go on from: that of ``generate: false``."""
        self._draft.version = version
        events = self._draft.prepared()
        return events if self.body.stream else [self._draft.response]

    def chat_request(self) -> ChatRequest:
        body = self.body
        items = read(Conversation, {"items": [*(self._earlier or ()), *self._items]})[0].items
        orders = [{"role": "system", "content": body.instructions}] if body.instructions else []
        choice, form = body.tool_choice, body.text and body.text.format
        return self._chats.read_fields(
            {
                "messages": orders + messages_of(items),
                "tools": [tool.for_chat() for tool in body.tools or ()] or None,
                "tool_choice": choice
                if isinstance(choice, str | None)
                else {"type": "function", "function": {"name": choice.name}},
                "response_format": form and form.for_chat(),
                "max_tokens": body.max_output_tokens,
                "reasoning_effort": body.reasoning and body.reasoning.effort,
                **body.model_dump(
                    include={
                        *("model", "stream", "temperature", "top_p", "top_k", "seed"),
                        *("parallel_tool_calls", "chat_template_kwargs", "policy_version"),
                    }
                ),
            }
        )

    error = staticmethod(responses_error)


def _is_name(item: Json) -> bool:
    return bool(item["type"] == "item_reference")


def _no_item(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"There is no item {name!r} of a response to go on from: {why_not_kept(MAX_STORED)} Send the item "
        "itself.",
        param="input",
    )


class Compact(Responses):
    """A request for a shorter conversation: its messages, and a summary of the rest by the policy itself.

    https://developers.openai.com/api/docs/guides/compaction
    """

    def __init__(self, body: Json, chats: ChatReader | None = None) -> None:
        given, dropped = read(CompactRequest, body)
        super().__init__({**given.model_dump(exclude_none=True), "store": False}, chats)
        self.dropped = dropped

    def chat_request(self) -> ChatRequest:
        chat = super().chat_request()
        last = ChatMessage(role="user", content=SUM_UP)
        return chat.model_copy(update={"messages": [*chat.messages, last]})

    def answer(self, completion: Json) -> Json:
        response = super().answer(completion)
        number = response["id"].removeprefix(self.id_prefix)
        kept: list[Json] = []
        for item in self.conversation():
            if item["type"] == "message" and item["role"] != "assistant":
                content = item["content"]
                parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
                named = {"id": f"msg_{number}{len(kept):03d}", "status": "completed", **item}
                kept.append({**named, "content": parts})
        texts = [part["text"] for item in self._draft.output for part in item.get("content", ())]
        summary = {"id": f"cmp_{number}", "encrypted_content": SUMMARY + "".join(texts)}
        return {
            **{name: response[name] for name in ("id", "created_at", "usage", "policy_version")},
            "object": "response.compaction",
            "output": [*kept, {"type": "compaction", **summary}],
            **self._draft.recorded,
        }


class _Draft(ResponseDraft):
    """The response to a request, which it repeats; its id is that of the chat completion."""

    def __init__(self, body: Json) -> None:
        given = {name: body[name] for name in REPEATED if body.get(name) is not None}
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"A text of the request is no Unicode ({error.reason}): leave half a surrogate pair out."
            ) from error
        if "tools" in given:
            given["tools"] = [TOOL | each for each in given["tools"]]
        if "reasoning" in given:
            given["reasoning"] = REPEATED["reasoning"] | given["reasoning"]
        super().__init__(body["model"], given)

    def begin(self, part: Json) -> Iterator[Json]:
        number = str(part["id"]).removeprefix(CHAT_PREFIX)
        begun = {"id": f"{Responses.id_prefix}{number}", "created_at": part["created"], **self.recorded}
        self.response |= begun
        return super().begin(part)

    def prepared(self) -> list[Json]:
        """The events of a response without an answer."""
        ended = {"usage": usage_of(0, 0), "policy_version": self.version}
        return [*super().begin({}), self.finish(is_whole=True, **ended)]
