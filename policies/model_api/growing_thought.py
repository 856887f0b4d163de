"""The thoughts of a streamed answer, told from the rest while they grow."""

from __future__ import annotations

from collections.abc import Iterable

from environments.thoughts import MARKS, SplitThought, opened_thought, with_opening


class GrowingThought:
    """Sorts the text of an answer that comes in pieces into thoughts and the rest, as ``split_thought`` does.

    The marks themselves are left out. Held back is what may be the beginning of one.

    Args:
        prompt_end: the last characters of the prompt, which may have opened a thought.
    """

    def __init__(self, prompt_end: str) -> None:
        self._closing = MARKS.get(opened_thought(prompt_end), "")
        self._held = ""
        self._content = ""

    def add(self, text: str, is_last: bool) -> tuple[str, str]:
        """The thought and the rest that this piece of the text makes certain."""
        rest = self._held + text
        thought, before = "", len(self._content)
        while rest:
            marks = [self._closing] if self._closing else list(MARKS)
            found = min(((rest.find(mark), mark) for mark in marks if mark in rest), default=None)
            end = found[0] if found else len(rest) - (0 if is_last else num_held(rest, marks))
            if self._closing:
                thought += rest[:end]
            else:
                self._content += rest[:end]
            if found is None:
                rest = rest[end:]
                break
            rest = rest[end + len(found[1]) :]
            if self._closing:
                self._closing = ""
            elif _in_code(self._content):
                self._content += found[1]
            else:
                self._closing = MARKS[found[1]]
        self._held = rest
        return thought, self._content[before:]


class WholeThought:
    """As ``GrowingThought``, where only the whole answer shows what is a thought.

    Args:
        prompt_end: the last characters of the prompt, which may have opened a thought.
        split: tells the thought of a text from its answer.
    """

    def __init__(self, prompt_end: str, split: SplitThought) -> None:
        self._prompt_end = prompt_end
        self._split = split
        self._text = ""

    def add(self, text: str, is_last: bool) -> tuple[str, str]:
        """Nothing, and with the last piece the thought and the rest."""
        self._text += text
        return self._split(with_opening(self._prompt_end, self._text)) if is_last else ("", "")


def num_held(text: str, marks: Iterable[str]) -> int:
    """The characters at the end of a text that may be the beginning of a mark."""
    beginnings = (mark[:size] for mark in marks for size in range(1, len(mark)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


def _in_code(text: str) -> bool:
    """Whether code has begun and not ended: what comes next is quoted."""
    *_, outside = text.split("```")
    return text.count("```") % 2 == 1 or outside.rpartition("\n")[2].count("`") % 2 == 1
