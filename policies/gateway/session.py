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

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from operator import is_
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
    """Messages of the assistant that the model has not said there: they are context, and never trained."""
    num_restored: int
    """Others of them that the chat template gets with the thought or text which the program has left out."""


@dataclass(slots=True)
class _Answered:
    """A call that has its answer: the places of its messages and of the answer, and what was told of that."""

    number: int
    path: list[int]
    message: Message


class Session:
    """Holds the calls of one program, in their order. Calls are placed one at a time.

    Args:
        keeps_thoughts: the model sees its own words again also where the program has left their thought out,
            or the text beside a call. Else such a message is the program's, as it is for a model in service.
    """

    def __init__(self, keeps_thoughts: bool = True) -> None:
        self._keeps_thoughts = keeps_thoughts
        self._children: dict[tuple[int, str], int] = {}
        self._messages: list[Message] = [{}]
        """Messages by place; that of ``START`` is none."""
        self._answers: defaultdict[int, list[_Answered]] = defaultdict(list)
        """Answers by the place of the message before the answer."""
        self._through: defaultdict[str, dict[int, _Answered]] = defaultdict(dict)
        """The latest call whose messages go through a place, by its list of tools."""
        self._known: set[int] = set()
        """The places of all calls that were answered."""
        self._call = PolicyCall([])
        """The call that was placed last."""
        self._path: list[int] = []
        """The places of ``START`` and of its messages; empty before the first call."""
        self._own: list[_Answered | None] = []
        """The calls whose answers its messages are; ``None`` for each that is none."""
        self._restored: list[bool] = []
        """True for each of its messages that gets back the thought or the text that it lacks."""
        self._tools = ""
        self.num_calls = 0

    def place(self, call: PolicyCall) -> PlacedCall:
        """Find where a call belongs. ``answer`` has to come before the next one.

        Messages that are the objects of the call before stay where they are: its answer, which alone has come
        since, stands behind all of them.
        """
        num_same = sum(takewhile(bool, map(is_, call.messages, self._call.messages)))
        path, own = self._path[: num_same + 1] or [START], self._own[:num_same]
        restored = self._restored[:num_same]
        for message in call.messages[num_same:]:
            answered = self._own_answer(path[-1], message) if message["role"] == "assistant" else None
            own.append(answered)
            path.append(self._place(path[-1], message) if answered is None else answered.path[-1])
            restored.append(answered is not None and _lacks_part(answered.message, message))
        self._call, self._path, self._own, self._tools = call, path, own, _key(call.tools)
        self._restored = restored
        follows = [each.number for each in own if each is not None]
        num_answers = [message["role"] for message in call.messages].count("assistant")
        num_known = sum(map(self._known.__contains__, path[1:]))
        messages = list(map(self._messages.__getitem__, path[1:]))
        return PlacedCall(
            messages=messages,
            new=messages[num_known:],
            follows=follows[-1] if follows else None,
            branch=self._branch(path, self._tools, num_known),
            num_foreign=num_answers - len(follows),
            num_restored=sum(restored),
        )

    def answer(self, text: str, message: Message) -> None:
        """Take note of the answer to the call that was placed last.

        Args:
            text: all that the model has said.
            message: what the program is told of it.
        """
        path = self._path
        assert path, "a call has to be placed before it is answered"
        place = len(self._messages)  # of its own, also where the model has said the same before
        self._messages.append({"role": "assistant", "content": text})
        answered = _Answered(self.num_calls, [*path, place], message)
        self._answers[path[-1]].append(answered)
        self._through[self._tools] |= dict.fromkeys(answered.path, answered)
        self._known.update(answered.path)
        self.num_calls += 1

    def _place(self, parent: int, message: Message) -> int:
        place = self._children.setdefault((parent, _key(message)), len(self._messages))
        if place == len(self._messages):
            self._messages.append(message)
        return place

    def _own_answer(self, place: int, given: Message) -> _Answered | None:
        """The answer here that ``given`` is most like; the latest of several."""
        likeness: tuple[int, ...] = ()
        found = None
        for answered in self._answers.get(place, ()):
            sent = answered.message
            if not self._keeps_thoughts and _lacks_part(sent, given):
                continue
            if (alike := _likeness(sent, given)) and alike >= likeness:
                likeness, found = alike, answered
        return found

    def _branch(self, path: list[int], tools: str, num_known: int) -> str:
        if not self._known:  # the first call
            return ""
        if num_known == 0:
            return "another system prompt" if self._role(path[1]) == "system" else "another conversation"
        near = self._through[tools].get(path[num_known])
        if near is None:
            return "another list of tools"
        if num_known == len(near.path) - 1:  # all of it, the answer too
            return ""
        if num_known == len(path) - 1:
            return "asked again" if path[-1] in self._answers else "history cut short"
        ours, theirs = (
            [_key(self._messages[place]) for place in each[num_known + 1 :]] for each in (path, near.path)
        )
        shared = set(theirs)
        has_moved = any(
            each in shared and each not in theirs[index : index + 1] for index, each in enumerate(ours)
        )
        role, before = self._role(path[num_known + 1]), self._role(near.path[num_known + 1])
        if has_moved or (role != before and len(ours) < len(theirs)):
            return "history compacted"
        if before == "user" and all(self._role(place) == "system" for place in path[1 : num_known + 1]):
            return "another conversation"
        given = self._messages[path[num_known + 1]]
        answers = self._answers.get(path[num_known], ()) if role == "assistant" else ()
        if any(_likeness(each.message, given) and _drops_thought(each.message, given) for each in answers):
            return "thoughts dropped"
        return {"assistant": "answer edited", "tool": "tool result edited"}.get(before, "history edited")

    def _role(self, place: int) -> str:
        return str(self._messages[place]["role"])


def _likeness(sent: Message, given: Message) -> tuple[int, ...]:
    """Return how much of what a program was sent comes back from it, which is greater where it is more; empty
    where that means something else.

    White space, the form of JSON and the ids of calls may differ, and the thought may be gone or stand
    within the text. Beside a call that is known by its id the text may be gone, too.
    """
    thought, content = given.get("reasoning_content") or "", given.get("content") or ""
    sent_thought, sent_content = sent.get("reasoning_content") or "", sent.get("content") or ""
    if content and not _same_words(content, sent_content):
        thought, content = split_thought(content)
    calls, sent_calls = given.get("tool_calls") or [], sent.get("tool_calls") or []
    has_ids = [call["id"] for call in calls] == [call["id"] for call in sent_calls]
    has_thought = _same_words(thought, sent_thought)
    if (thought and not has_thought) or not (
        _same_words(content, sent_content) or (calls and has_ids and not content)
    ):
        return ()
    # As text, since 1 == True.
    has_form = _key([call["function"] for call in calls]) == _key([call["function"] for call in sent_calls])
    if not has_form and list(map(_meaning, calls)) != list(map(_meaning, sent_calls)):
        return ()
    is_exact = (
        thought == sent_thought,
        content.strip() == sent_content.strip(),
        content == sent_content,
        has_form,
    )
    return has_ids, has_thought, sum(is_exact)


def _drops_thought(sent: Message, given: Message) -> bool:
    return bool(_parts(sent)[0]) and not _parts(given)[0]


def _lacks_part(sent: Message, given: Message) -> bool:
    """Return whether a message comes back without the thought or the text that the program was sent."""
    return any(one and not other for one, other in zip(_parts(sent), _parts(given), strict=True))


def _parts(message: Message) -> tuple[str, str]:
    """The thought and the text of a message."""
    thought, text = split_thought(message.get("content") or "")
    return message.get("reasoning_content") or thought, text.strip()


def _same_words(one: str, other: str) -> bool:
    return one == other or one.split() == other.split()


def _meaning(call: Json) -> tuple[str, str]:
    function = call["function"]
    return function["name"], _key(_with_whole_numbers(function["arguments"]))


def _with_whole_numbers(arguments: Json) -> Any:
    """The arguments with 1 in place of 1.0: JSON knows no difference, and many programs write the former."""

    def read(number: str) -> float:
        value = float(number)
        return int(value) if value.is_integer() else value

    return json.loads(json.dumps(arguments), parse_float=read)


_key = json.JSONEncoder(sort_keys=True).encode
