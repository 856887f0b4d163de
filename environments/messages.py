"""Chat messages, and the conversations of a trajectory, which share theirs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from numbers import Integral, Real
from typing import Any, NamedTuple

from environments.prefix_tree import PrefixTree, Span
from environments.rewards.base import is_bool

Json = dict[str, Any]
Message = Json
"""A chat message in the OpenAI shape: ``{"role": ..., "content": ...}``."""

PLAIN_TYPES = {str, int, float, bool, type(None)}
"""Types whose values JSON gives back as they were."""
TEXT = {str}


def picture_of(part: Any) -> Any:
    """Return the picture in a part of a message's content, as an address; ``None`` for another part."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    address = part.get("image_url")
    return address.get("url") if isinstance(address, dict) else address


def is_part(value: Any) -> bool:
    """Return whether a value is a part of a message's content, a text or a picture."""
    return isinstance(value, dict) and value.get("type") in ("text", "image_url")


class MessageTable:
    """The messages of a trajectory, each stored once; a conversation is the sequence of their numbers."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._conversations = PrefixTree()
        self._numbers: dict[Hashable, int] = {}

    def __getstate__(self) -> tuple[list[Message], PrefixTree]:
        return self._messages, self._conversations

    def __setstate__(self, state: tuple[list[Message], PrefixTree]) -> None:
        self._messages, self._conversations = state
        self._numbers = {}

    @property
    def root(self) -> Conversation:
        """The conversation without a message."""
        return Conversation(self, self._conversations.root)

    def add(self, messages: Iterable[Message]) -> Conversation:
        """Store a conversation."""
        return self.root.extended(messages)

    def numbers(self, messages: Iterable[Message]) -> list[int]:
        """The numbers of ``messages``, of which those that are not there yet are stored."""
        if not self._numbers:
            self._numbers = {json_key(message): number for number, message in enumerate(self._messages)}
        found = []
        for message in messages:
            number = self._numbers.setdefault(json_key(message), len(self._messages))
            if number == len(self._messages):
                self._messages.append(message)
            found.append(number)
        return found

    def read(self, numbers: Iterable[int]) -> list[Message]:
        """The messages with these numbers."""
        return [self._messages[number] for number in numbers]


class Conversation(NamedTuple):
    """Messages that a model saw, and its answer, as they are stored in ``table``."""

    table: MessageTable
    span: Span

    @property
    def messages(self) -> list[Message]:
        """A list of the messages."""
        return self.after(0)

    def after(self, num_messages: int) -> list[Message]:
        """The messages behind the first ones."""
        return self.table.read(self.span.part(num_messages, self.span.stop).read())

    def first(self, num_messages: int) -> Conversation:
        """The conversation of the first messages."""
        return self._replace(span=self.span.part(0, num_messages))

    def extended(self, messages: Iterable[Message]) -> Conversation:
        """Store ``messages`` behind this conversation; return both as one."""
        return self._replace(span=self.span.extended(self.table.numbers(messages)))


def same_types(one: Any, other: Any) -> bool:
    """Return whether two values that are equal become the same JSON, though in Python 1 == True."""
    if isinstance(one, dict):
        is_text = TEXT.issuperset(map(type, one.values()))  # most messages
        return is_text or all(same_types(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return all(map(same_types, one, other))
    return type(one) is type(other)


def json_key(value: Any) -> Hashable:
    """A key that two values share where both become the same JSON.

    A value of a type that JSON does not know is the same as no other one.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return kind, repr(value) if kind is float else value  # 0.0 == -0.0
    if isinstance(value, dict):
        if TEXT.issuperset(map(type, chain(value, value.values()))):  # most messages
            return kind, *value.items()
        return kind, *((type(name), name, json_key(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return kind, *map(json_key, value)
    return kind, id(value)


def is_plain(value: Any) -> bool:
    """Return whether JSON gives the value back as it is, all of its types included."""
    kind = type(value)
    if kind is dict:
        return TEXT.issuperset(map(type, value)) and all(map(is_plain, value.values()))
    return kind in PLAIN_TYPES or (kind is list and all(map(is_plain, value)))


def plain_json(value: Any) -> Any:
    """The value as it will be read again: a number of numpy's becomes Python's, and any other value or key
    that JSON does not know its text.

    It may share parts with ``value``.
    """
    if is_plain(value):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return bool(value) if is_bool(value) else str(value)
