"""Dialects: the forms in which clients send a request to a policy and get its answer.

A dialect is made for one request. It turns that into a ``ChatRequest``, and the chat completion, or the
chunks of its stream, into its own answer or events; one request to the engine is behind them all. Fields that
cannot change the answer are dropped, and ``dropped`` names them; others are honoured, or an error by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from operator import eq
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError, ValidationInfo, model_validator

from policies.model_api.dialects.errors import openai_error
from policies.model_api.errors import InvalidRequestError, invalid_body
from policies.model_api.growing_text import GrowingThought
from policies.model_api.limits import MAX_MESSAGES
from policies.model_api.messages import Body, ChatMessage, Json, kind_of
from policies.model_api.protocol import ChatRequest

Event = tuple[str | None, Json]
"""The name of an event of a stream, where it has one, and its data."""
M = TypeVar("M", bound=BaseModel)

DONE = "[DONE]"
CHAT_PREFIX = "chatcmpl-"
"""Beginning of an answer's id in chats; other dialects have their own before the same number."""
THOUGHT, TEXT, CALL = "thought", "text", "call"
"""Kinds of the blocks of an answer."""
FILES = ("input_file", "input_audio", "document", "file")
"""Types of the parts that hold neither text nor a picture."""


class Dialect(ABC):
    """One request in one dialect, which is read when the object is made. Raises ``RequestError`` then.

    Args:
        body: of the request.
        chats: reads the requests of a whole conversation; without it, this one stands alone.
    """

    terminator: ClassVar[str | None] = DONE
    """Data after the last event of a stream; ``None`` where nothing comes."""
    id_prefix: ClassVar[str] = CHAT_PREFIX
    """Beginning of the answer's id."""
    dropped: tuple[str, ...]
    """Fields of the request that were dropped, since they cannot change its answer."""
    _draft: Draft

    def __init__(self, body: Json, chats: ChatReader | None = None) -> None:
        self._chats = chats or ChatReader()

    @abstractmethod
    def chat_request(self) -> ChatRequest:
        """The request to the engine. Raises ``RequestError`` for what cannot be served."""

    def answer(self, completion: Json) -> Json:
        """The answer that says what a ``chat.completion`` says."""
        return self._draft.completed(completion)

    def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Event]:
        """The events that say what the chunks of a ``chat.completion`` say."""
        return self._draft.events(chunks)

    @staticmethod
    def error(error: Exception) -> tuple[int, Json]:
        """Status and body of a failure; also the data of a stream's last event."""
        return openai_error(error)


class Part(Body):
    """A part of a request, which comes without its harmless fields."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot change an answer."""

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict) or not (found := cls.harmless & given.keys()):
            return given
        if info.context is not None:
            info.context.update(name for name in found if given[name] is not None)
        return {name: value for name, value in given.items() if name not in found}


def read(model: type[M], body: Json) -> tuple[M, tuple[str, ...]]:
    """Read a body; also return the names of the fields that were dropped. Raises ``InvalidRequestError``."""
    dropped: set[str] = set()
    try:
        return model.model_validate(body, context=dropped), tuple(sorted(dropped))
    except ValidationError as error:
        raise invalid_body(error.errors()) from error


class ChatReader:
    """Reads chat requests: messages with which the one before began too are not read again."""

    def __init__(self) -> None:
        self._last: tuple[list[Any], list[ChatMessage]] = [], []
        """Messages of the request before, as they came and as they were read: one value for all threads."""

    def read(self, body: Any) -> ChatRequest:
        """The request with this body. Raises ``InvalidRequestError``."""
        match body:
            case {"messages": [*given]} if 0 < len(given) <= MAX_MESSAGES:
                before, known = self._last
                num_same = sum(takewhile(bool, map(eq, given[:-1], before)))  # what counts in them is text
                with suppress(InvalidRequestError):  # it comes again below, with its place among all messages
                    request, _ = read(ChatRequest, {**body, "messages": given[num_same:]})
                    request.messages = known[:num_same] + request.messages
                    self._last = before[:num_same] + given[num_same:], request.messages
                    return request
        return read(ChatRequest, body)[0]

    def read_fields(self, fields: Json) -> ChatRequest:
        """The request with these fields, but for those that are ``None``. Raises ``InvalidRequestError``."""
        given = {name: value for name, value in fields.items() if value is not None}
        if given.get("stream"):
            given["stream_options"] = {"include_usage": True}
        return self.read(given)


class HasText(Protocol):
    """A part of a message that holds a text."""

    @property
    def text(self) -> str: ...


class Picture(Part, ABC):
    """A part of a message that shows a picture."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Data: URL of it, or whatever the client has written in that place."""


def chat_content(given: str | Sequence[HasText | Picture]) -> str | list[Json]:
    """The content of a message as chats have it."""
    return given if isinstance(given, str) else [*map(_chat_part, given)]


def _chat_part(part: HasText | Picture) -> Json:
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": part.address}}
    return {"type": "text", "text": part.text}


def served(noun: str, kinds: Collection[str | None], remedy: str) -> BeforeValidator:
    """Takes only parts of these types."""

    def check(part: Any) -> Any:
        if (kind := kind_of(part)) not in kinds:
            raise ValueError(f"{noun} of type {kind!r} is not served{remedy}")
        return part

    return BeforeValidator(check)


def readable(part: Any) -> Any:
    """``part``, which is no file. Raises ``ValueError``."""
    if (kind := kind_of(part)) in FILES:
        raise ValueError(f"{kind!r} is a file, which no model here reads: leave it out, or send its text")
    return part


class Chat(Dialect):
    """OpenAI's chat completions: what the engine's requests and answers look like anyway."""

    def __init__(self, body: Json, chats: ChatReader | None = None) -> None:
        super().__init__(body, chats)
        self._request = self._chats.read(body)
        ignored = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user", "metadata")
        names = sorted((*ignored, "service_tier", "store", "verbosity"))
        self.dropped = tuple(name for name in names if getattr(self._request, name) is not None)

    def chat_request(self) -> ChatRequest:
        return self._request

    def answer(self, completion: Json) -> Json:
        return completion

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Event]:
        async for chunk in chunks:
            yield None, chunk


class Draft(ABC):
    """An answer in the making: blocks of thoughts, text and calls, of which one grows at a time.

    White space between a thought and the text behind it belongs to neither.
    """

    response: Json
    """The answer as far as it is made."""

    def __init__(self) -> None:
        self.version = 0
        """The oldest version of the policy that has sampled a token."""
        self.usage: Json = {"prompt_tokens": 0, "completion_tokens": 0}
        self.finish_reason = "stop"
        self.stop: str | None = None
        """The stop string that has ended the answer."""
        self.text = ""
        """Text, or arguments, of the open block."""
        self.recorded: Json = {}
        """Field ``recorded`` of the answer, where the server records answers."""
        self._has_begun = False
        self._open: tuple[str, int] | None = None
        """Kind of the block that grows, and the number of its call."""

    def completed(self, completion: Json) -> Json:
        """The answer that is made of a whole completion."""
        list(self.add(completion))
        list(self.end())
        return self.response

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Event]:
        """The events that show the answer grow, while it is made of ``chunks``."""
        async for chunk in chunks:
            for event in self.add(chunk):
                yield event["type"], event
        for event in self.end():
            yield event["type"], event

    def add(self, part: Json) -> Iterator[Json]:
        """The events of the next chunk, or of a whole completion."""
        self.recorded = {"recorded": part["recorded"]} if "recorded" in part else {}
        version = part.get("policy_version", 0)
        self.version = min(self.version, version) if self._has_begun else version
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin(part)
        self.usage = part.get("usage") or self.usage
        for choice in part["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.stop = choice.get("stop_reason")
            delta = choice["delta"] if "delta" in choice else _as_delta(choice["message"])
            if thought := delta.get("reasoning_content"):
                yield from self.grow(THOUGHT, thought)
            if text := self._visible(delta.get("content") or ""):
                yield from self.grow(TEXT, text)
            for number, call in enumerate(delta.get("tool_calls") or ()):
                arguments = call["function"].get("arguments") or ""
                yield from self.grow(CALL, arguments, call.get("index", number), call)

    def _visible(self, text: str) -> str:
        is_after_thought = self._open is not None and self._open[0] == THOUGHT
        return text.lstrip() if is_after_thought else text

    def grow(self, kind: str, text: str, number: int = 0, call: Json | None = None) -> Iterator[Json]:
        """Add to the block of this kind, which is a new one unless it is the open one."""
        if self._open != (kind, number):
            yield from self.close()
            self._open, self.text = (kind, number), ""
            yield from self.begin_block(kind, call or {})
        self.text += text
        yield from self.grow_block(kind, text)

    def close(self, is_whole: bool = True) -> Iterator[Json]:
        """End the open block, if there is one."""
        if self._open is not None:
            kind, self._open = self._open[0], None
            yield from self.end_block(kind, is_whole)

    @abstractmethod
    def begin(self, part: Json) -> Iterator[Json]:
        """The events before the first block; ``part`` is the first chunk."""

    @abstractmethod
    def begin_block(self, kind: str, call: Json) -> Iterator[Json]:
        """The events with which a block begins."""

    @abstractmethod
    def grow_block(self, kind: str, text: str) -> Iterator[Json]:
        """The events with which the open block grows."""

    @abstractmethod
    def end_block(self, kind: str, is_whole: bool) -> Iterator[Json]:
        """The events with which the open block ends."""

    @abstractmethod
    def end(self) -> Iterator[Json]:
        """The events after the last chunk."""


def _as_delta(message: Json) -> Json:
    """A whole message with its thought apart, as in a stream."""
    if message.get("reasoning_content") or not message.get("content"):
        return message
    thought, text = GrowingThought("").add(message["content"], is_last=True)
    return {**message, "reasoning_content": thought, "content": text}
