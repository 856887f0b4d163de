"""Tells a thinking model's thought from its answer. Rewards, agents and the server all ask here."""

from __future__ import annotations

import re
from collections.abc import Callable

SplitThought = Callable[[str], tuple[str, str]]
"""Tells the thought of a text from its answer, as ``split_thought`` does."""

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
"""How models open a thought, and how they close it."""

_CLOSING = re.compile("|".join(map(re.escape, MARKS.values())))
_CODE_OR_OPENING = re.compile(rf"```.*?```|`[^`\n]+`|(?P<mark>{'|'.join(map(re.escape, MARKS))})", re.DOTALL)


def split_thought(text: str) -> tuple[str, str]:
    """The thought and the answer of a response: what is within the marks of a thought, and all the rest.

    A thought whose opening mark stood at the end of the prompt has only its closing mark here. A mark that
    is quoted as code opens none. A thought that is opened and never closed is unfinished: then nothing in
    the text is an answer, so the answer is empty.
    """
    thoughts, answers, is_open = _parts(text)
    return "\n".join(thought.strip() for thought in thoughts), "" if is_open else "".join(answers)


def is_unfinished(text: str) -> bool:
    """Whether a response ends within a thought."""
    return bool(open_mark(text))


def open_mark(text: str) -> str:
    """The mark of the thought within which a text ends. Else empty."""
    return _parts(text)[2]


def _parts(text: str) -> tuple[list[str], list[str], str]:
    """The thoughts of a text, what is around them, and the mark of the last thought if it is left open."""
    thoughts, answers, position = [], [], 0
    closing, opening = _CLOSING.search(text), _opening(text, 0)
    if closing is not None and (opening is None or closing.start() < opening.start()):
        thoughts.append(text[: closing.start()])
        position = closing.end()
    while (opening := _opening(text, position)) is not None:
        answers.append(text[position : opening.start()])
        mark = MARKS[opening["mark"]]
        end = text.find(mark, opening.end())
        if end < 0:
            return [*thoughts, text[opening.end() :]], answers, opening["mark"]
        thoughts.append(text[opening.end() : end])
        position = end + len(mark)
    return thoughts, [*answers, text[position:]], ""


def opened_thought(prompt: str) -> str:
    """The mark of a thought with which a rendered prompt ends: the model goes on within it. Else empty."""
    end = prompt.rstrip()
    return next((mark for mark in MARKS if end.endswith(mark)), "")


def with_opening(prompt: str, text: str) -> str:
    """A completion's text, after the opening of a thought by its prompt where the text does not end that."""
    mark = opened_thought(prompt)
    if not mark or MARKS[mark] in text:
        return text
    return prompt[prompt.rindex(mark) :] + text


def without_opening(text: str) -> str:
    """A text without the mark that it begins with, where it begins within a thought."""
    begun = text.lstrip()
    return begun.removeprefix(next((mark for mark in MARKS if begun.startswith(mark)), ""))


def _opening(text: str, position: int) -> re.Match[str] | None:
    """The first mark at or behind ``position`` that opens a thought."""
    found = _CODE_OR_OPENING.finditer(text, position)
    return next((each for each in found if each["mark"] is not None), None)
