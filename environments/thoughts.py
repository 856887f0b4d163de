"""Thoughts and answers of thinking models, for rewards, agents and the server alike.

A mark that is quoted as code is none. An opening one is quoted within a fence or backticks that are closed
again; a closing one where a backtick is open before it in its line and another follows it at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

SplitThought = Callable[[str], tuple[str, str]]
"""Splits a text into its thought and its answer, as ``split_thought`` does."""

MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<longcat_think>": "</longcat_think>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
"""Closing marks of thoughts by their opening ones. Upper and lower case are the same in both."""

_BY_LOWER = {mark.lower(): mark for mark in MARKS}
_LONGEST = max(map(len, [*MARKS, *MARKS.values()]))
_CASES = re.IGNORECASE | re.ASCII
"""Without the latter, letters of other alphabets are those of marks, though ``lower`` knows better."""


def _any_of(marks: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)), _CASES)


_OPENING = _any_of([*MARKS])
_CLOSING = {"": _any_of([*MARKS.values()]), **{mark: _any_of([closing]) for mark, closing in MARKS.items()}}
"""Patterns of the closing mark by the opening one; by the empty one, of any."""
_TICKS_OR_OPENING = re.compile(f"```|`|{_OPENING.pattern}", _CASES)  # a group would cost a search its speed
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


class FoundMark(NamedTuple):
    """A mark in a text; where there is none, the end of what certainly stands before the next one."""

    start: int
    end: int
    mark: str
    """The opening mark, also of a closing one as far as it is known. Empty where none is found."""
    is_found: bool
    resume: int
    """The position from which a longer text has to be searched."""


def split_thought(text: str) -> tuple[str, str]:
    """Split a response into its thought and its answer: what is within the marks of a thought, and the rest.

    A thought whose opening mark stood at the end of the prompt has only its closing mark here. A thought
    that is opened and never closed is unfinished: then nothing in the text is an answer, so that is empty.
    """
    thoughts, answers, is_open = _parts(text)
    return "\n".join(thought.strip() for thought in thoughts), "" if is_open else "".join(answers)


def is_unfinished(text: str) -> bool:
    """Return whether a response ends within a thought."""
    return bool(open_mark(text))


def open_mark(text: str) -> str:
    """Return the mark of the thought within which a text ends, or an empty text."""
    return _parts(text)[2]


def _parts(text: str) -> tuple[list[str], list[str], str]:
    """Return the thoughts of a text, what is around them, and the mark of the last thought if it is open."""
    thoughts, answers, position = [], [], 0
    closing, opening = find_closing(text), find_opening(text)
    if closing.is_found and closing.start <= opening.start:
        thoughts.append(text[: closing.start])
        position = closing.end
    while (opening := find_opening(text, position)).is_found:
        answers.append(text[position : opening.start])
        closing = find_closing(text, opening.mark, opening.end)
        thoughts.append(text[opening.end : closing.start])
        if not closing.is_found:
            return thoughts, answers, opening.mark
        position = closing.end
    return thoughts, [*answers, text[position:]], ""


def find_opening(text: str, position: int = 0, is_whole: bool = True) -> FoundMark:
    """Find the first mark behind ``position`` that opens a thought.

    Args:
        is_whole: whether no more text comes, by which a mark could become quoted.
    """
    while (found := _TICKS_OR_OPENING.search(text, position)) is not None:
        if (mark := _BY_LOWER.get(found[0].lower())) is not None:
            return FoundMark(found.start(), found.end(), mark, True, found.end())
        code = _CODE.match(text, found.start())
        if code is None and not is_whole and _may_become_code(text, found.start()):
            next_mark = _OPENING.search(text, found.end())
            return _not_found(next_mark.start() if next_mark else len(text), found.start())
        position = (code or found).end()
    return _not_found(len(text), max(position, len(text) - _LONGEST))


def find_closing(text: str, opening: str = "", position: int = 0, is_whole: bool = True) -> FoundMark:
    """Find the first mark behind ``position`` that closes the thought of the mark ``opening``, or any."""
    for found in _CLOSING[opening].finditer(text, position):
        start = max(position, text.rfind("\n", position, found.start()) + 1)
        is_in_code = text.count("`", start, found.start()) % 2 == 1
        if is_in_code and not is_whole and found.end() == len(text):
            return _not_found(found.start(), start)
        if not (is_in_code and text.startswith("`", found.end())):
            return FoundMark(found.start(), found.end(), opening, True, found.end())
    last_line = text.rfind("\n", position, max(position, len(text) - _LONGEST)) + 1
    return _not_found(len(text), last_line or position)


def _not_found(end: int, resume: int) -> FoundMark:
    return FoundMark(end, end, "", False, resume)


def _may_become_code(text: str, start: int) -> bool:
    """Return whether more text can close the code that begins at ``start``."""
    if text.startswith("```", start) or text[start:] in ("`", "``"):
        return True
    return not re.search(r"[`\n]", text[start + 1 :])


def opened_thought(prompt: str) -> str:
    """Return the mark of a thought with which a rendered prompt ends, as the model goes on within it."""
    end = prompt[-2 * _LONGEST :].rstrip().lower()
    return next((mark for lower, mark in _BY_LOWER.items() if end.endswith(lower)), "")


def with_opening(prompt: str, text: str) -> str:
    """Return a completion's text behind the opening of its thought, where the prompt opens one.

    A text whose first mark closes the thought, or that repeats its opening, stays as it is.
    """
    mark = opened_thought(prompt)
    if not mark or text.lstrip().lower().startswith(mark.lower()):
        return text
    closing = find_closing(text, mark)
    if closing.is_found and closing.start <= min(find_closing(text).start, find_opening(text).start):
        return text
    return prompt[len(prompt.rstrip()) - len(mark) :] + text


def without_opening(text: str) -> str:
    """Return a text without the mark that it begins with, where it begins within a thought."""
    begun = text.lstrip()
    found = _OPENING.match(begun)
    return begun[found.end() :] if found else begun
