"""The calls of one program as a tree: the earlier call that each goes on from, with the model's own words.

A program sends its whole history with each call, often not as it got it: without thoughts, with other white
space, with JSON written anew. Where such a message means what the model has said, the model sees its own
words again, and the call extends the tokens of the one before::

    call 0   system, user                                  -> answer 0
    call 1   system, user, answer 0, tool result           -> answer 1    goes on from call 0
    call 2   another system, user                          -> answer 2    a branch: another system prompt
    call 3   system, user, answer 0, tool, answer 1, user  -> answer 3    goes on from call 1
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from environments.thoughts import split_thought
from environments.types import Message

Json = dict[str, Any]
START = 0
"""Place before all messages."""


@dataclass(frozen=True, slots=True)
class PolicyCall:
    """A program's request for the next message of a conversation.

    ``messages`` and ``tools`` are as the chat template takes them. ``sampling`` has the fields of
    ``SamplingParams`` that the program may choose.
    """

    messages: list[Message]
    tools: list[Json] | None = None
    sampling: Json = field(default_factory=dict)
    takes_one_tool_call: bool = False
    overruled: tuple[str, ...] = ()
    """Fields of the request in whose place the run's settings stand."""
    dropped: tuple[str, ...] = ()
    """Fields that were left out, since they change nothing."""

    @property
    def digest(self) -> str:
        """Digest of what is asked, equal for equal calls."""
        content = _key([self.messages, self.tools, self.sampling])
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call in the tree of its session, with the model's own words where it has said a message itself."""

    messages: list[Message]
    new: list[Message]
    """The messages that no earlier call had at this place."""
    follows: int | None
    """Number of the latest call whose answer is in the history."""
    branch: str
    """Reason for which it does not go on where an earlier call has ended; empty where it does."""
    num_foreign: int
    """Messages of the assistant that the model has not said: they are context, and never trained."""


@dataclass(slots=True)
class _Answered:
    """A call that has its answer: the places of its messages and of the answer, and what it was."""

    number: int
    path: list[int]
    tools: Hashable
    text: str
    message: Message


class Session:
    """Holds the calls of one program, in their order. Calls are placed one at a time."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Hashable], int] = {}
        self._messages: list[Message] = [{}]
        """Messages by place; that of ``START`` is none."""
        self._answers: defaultdict[int, list[_Answered]] = defaultdict(list)
        """Answers by the place of the message before the answer."""
        self._through: dict[int, _Answered] = {}
        """The latest call whose messages go through a place."""
        self._pending: tuple[list[int], Hashable] | None = None
        self.num_calls = 0

    def place(self, call: PolicyCall) -> PlacedCall:
        """Find where a call belongs. ``answer`` has to come before the next one."""
        path, follows, num_known, num_foreign = [START], None, 0, 0
        for message in call.messages:
            own = self._own_answer(path[-1], message) if message["role"] == "assistant" else None
            num_foreign += own is None and message["role"] == "assistant"
            if own is not None:
                follows, place = own, own.path[-1]
            else:
                place = self._place(path[-1], message)
            num_known += place in self._through
            path.append(place)
        tools = _key(call.tools)
        self._pending = path, tools
        messages = [self._messages[place] for place in path[1:]]
        return PlacedCall(
            messages=messages,
            new=messages[num_known:],
            follows=None if follows is None else follows.number,
            branch=self._branch(path, tools, num_known),
            num_foreign=num_foreign,
        )

    def answer(self, text: str, message: Message) -> None:
        """Take note of the answer to the call that was placed last.

        Args:
            text: all that the model has said.
            message: what the program is told of it.
        """
        assert self._pending is not None
        path, tools = self._pending
        place = self._place(path[-1], {"role": "assistant", "content": text})
        answered = _Answered(self.num_calls, [*path, place], tools, text, message)
        self._answers[path[-1]].append(answered)
        self._through |= dict.fromkeys(answered.path, answered)
        self.num_calls += 1

    def _place(self, parent: int, message: Message) -> int:
        place = self._children.setdefault((parent, _key(message)), len(self._messages))
        if place == len(self._messages):
            self._messages.append(message)
        return place

    def _own_answer(self, place: int, given: Message) -> _Answered | None:
        """The latest answer here that means the same as ``given``."""
        return next((each for each in reversed(self._answers[place]) if _means_same(each, given)), None)

    def _branch(self, path: list[int], tools: Hashable, num_known: int) -> str:
        if START not in self._through:  # the first call
            return ""
        if num_known == 0:
            return "another system prompt" if self._role(path[1]) == "system" else "another conversation"
        near = self._through[path[num_known]]
        if tools != near.tools:
            return "another list of tools"
        if num_known == len(near.path) - 1:  # all of it, the answer too
            return "" if len(path) > len(near.path) else "answer cut short"
        if num_known == len(path) - 1:
            return "asked again" if len(path) == len(near.path) - 1 else "history cut short"
        before = self._role(near.path[num_known + 1])
        if len(path) < len(near.path):
            return "history compacted"
        return {"assistant": "answer edited", "tool": "tool result edited"}.get(before, "history edited")

    def _role(self, place: int) -> str:
        return str(self._messages[place]["role"])


def _means_same(answered: _Answered, given: Message) -> bool:
    """Return whether a program sends back what it was told, up to white space and the form of JSON."""
    content, calls = given.get("content") or "", _calls(given)
    if not calls and _words(content) == _words(answered.text):
        return True
    thought, answer = split_thought(content)  # some programs write the thought into the text, in its marks
    return (
        calls == _calls(answered.message)
        and _words(answer) == _words(answered.message.get("content"))
        and (not thought or _words(thought) == _words(answered.message.get("reasoning_content")))
    )


def _words(content: str | None) -> list[str]:
    return (content or "").split()


def _calls(message: Message) -> list[tuple[str, str]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(each["name"], json.dumps(each["arguments"], sort_keys=True)) for each in functions]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
