"""The messages of a conversation in the form of Inspect (inspect_ai), for its logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.data.trajectory_json import Json, plain_json
from environments.messages import MessageTable, picture_of
from environments.prefix_tree import Span
from environments.types import Message, Step

FIELDS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}
"""Fields of a message in the form, by role."""


@dataclass(frozen=True, kw_only=True)
class TurnInput:
    """Messages that were new before a turn, and the prompt of the model."""

    places: list[tuple[int, int]]
    """Places of the prompt's messages in the pool: ranges, each with its end."""
    answers: list[Json]
    """The tool calls that were answered since the turn before, with their results."""


@dataclass
class MessagePool:
    """The messages of a trajectory, each once, however many turns repeat it.

    A history that an agent has rewritten is new from the first message that differs.
    """

    messages: list[Json] = field(default_factory=list)
    """Messages of all turns: the pool that the turns refer to."""
    first: list[Json] = field(default_factory=list)
    """The first prompt."""
    _places: list[int] = field(default_factory=list)
    _table: MessageTable = field(default_factory=MessageTable)
    _conversation: Span | None = None

    @property
    def now(self) -> list[Json]:
        """The conversation after the last turn."""
        return [self.messages[place] for place in self._places]

    def add_turn(self, step: Step) -> TurnInput:
        """Add the messages of ``step``, the next turn; its response is not part of the turn's input."""
        conversation = plain_json(step.chat_completions)
        stored = self._table.add(conversation).span
        del self._places[0 if self._conversation is None else stored.num_shared(self._conversation) :]
        num_old = len(self._places)
        for message in conversation[num_old:]:
            self._add(message)
        self._conversation = stored
        if ends_with_response(conversation):
            self._add_calls(step.action)
        end = len(conversation) - ends_with_response(conversation)
        self.first = self.first or [self.messages[place] for place in self._places[:end]]
        return TurnInput(places=_ranges(self._places[:end]), answers=self._answers(num_old, end))

    def _add(self, message: Message) -> None:
        place = len(self.messages)
        short = inspect_message(message, f"message-{place}")
        if short["role"] == "tool" and (call := _answered_call(self.now, message)):
            short |= {"tool_call_id": call["id"], "function": call["function"]}
        self.messages.append(short)
        self._places.append(place)

    def _add_calls(self, action: Any) -> None:
        """Add the calls that an agent has read in the text of a response, where that has none itself."""
        response = self.messages[self._places[-1]]
        if "tool_calls" not in response and _are_calls(action):
            response["tool_calls"] = _calls(plain_json(action), response["id"])

    def _answers(self, begin: int, end: int) -> list[Json]:
        """The tool messages among those of this turn, each with its call."""
        answers = []
        for index in range(begin, end):
            message = self.messages[self._places[index]]
            if message["role"] == "tool" and (call := _answered_call(self.now[:index], message)):
                own = {name: call[name] for name in ("id", "function", "arguments")}
                answers.append({**own, "result": message["content"], "message_id": message["id"]})
        return answers


def output_message(pool: MessagePool, step: Step, turn: int) -> Json:
    """Message of the model in ``step``, whose messages ``pool`` has taken in."""
    if ends_with_response(step.chat_completions):
        return pool.now[-1]
    return inspect_message({"role": "assistant", "content": step.model_response}, f"response-{turn}")


def ends_with_response(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].get("role") == "assistant"


def inspect_message(message: Message, name: str) -> Json:
    """``message`` in Inspect's form. Where a part has no place there, its metadata hold the whole message."""
    role = message["role"] if message.get("role") in FIELDS else "user"
    content = message.get("content")
    short: Json = {
        "id": name,
        "role": role,
        "content": content if isinstance(content, str) else content_text(content),
    }
    calls: Any = message.get("tool_calls")
    if role == "assistant" and _are_calls(calls):
        short["tool_calls"] = _calls(calls, name)
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        short["tool_call_id"] = message["tool_call_id"]
    fits = role == message.get("role") and isinstance(content, str) and set(message) <= FIELDS[role]
    if not fits or any("parse_error" in call for call in short.get("tool_calls", ())):
        short["metadata"] = {"message": message}
    return short


def content_text(content: Any) -> str:
    """Content in parts as one text: of a picture only that it is there, another part as JSON."""
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(map(_part_text, parts))


def _part_text(part: Any) -> str:
    if picture_of(part) is not None:
        return "[picture]"
    is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
    return part["text"] if is_text else json.dumps(part)


def _are_calls(value: Any) -> bool:
    """Return whether ``value`` is a list of tool calls in OpenAI's shape."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and isinstance(each.get("function"), Mapping) for each in value)
    )


def _calls(calls: Iterable[Mapping[str, Any]], name: str) -> list[Json]:
    return [_call(call, f"{name}-call-{number}") for number, call in enumerate(calls)]


def _call(call: Mapping[str, Any], name: str) -> Json:
    function = call["function"]
    given = function.get("arguments")
    short = {"id": str(call.get("id") or name), "function": str(function.get("name")), "type": "function"}
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return short | {"arguments": arguments}
    return short | {"arguments": {}, "parse_error": f"no JSON object: {given}"}


def _answered_call(conversation: Sequence[Json], message: Mapping[str, Any]) -> Json | None:
    """The call that a tool's message answers: the one that it names, else the next of the last response."""
    number = 0
    for each in reversed(conversation):
        if each["role"] == "assistant":
            calls: list[Json] = each.get("tool_calls", [])
            name = message.get("tool_call_id")
            if name is not None:
                return next((call for call in calls if call["id"] == name), None)
            return calls[number] if number < len(calls) else None
        number += each["role"] == "tool"
    return None


def _ranges(places: Sequence[int]) -> list[tuple[int, int]]:
    """``[0, 1, 2, 5]`` -> ``[(0, 3), (5, 6)]``."""
    ranges: list[tuple[int, int]] = []
    for place in places:
        if ranges and ranges[-1][1] == place:
            ranges[-1] = (ranges[-1][0], place + 1)
        else:
            ranges.append((place, place + 1))
    return ranges
