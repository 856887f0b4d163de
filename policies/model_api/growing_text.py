"""Text of a streamed answer in pieces that no later token changes, and its thoughts while they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from environments.thoughts import (
    MARKS,
    SplitThought,
    find_closing,
    find_opening,
    opened_thought,
    with_opening,
)

REPLACEMENT_CHARACTER = "\ufffd"
"""Character that the bytes of an unfinished one are decoded to."""


class GrowingText:
    """The text of tokens that come one by one. Its pieces join to the text of all tokens, cut at a stop.

    Held back is what later tokens may change: an unfinished character, the beginning of a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._token_ids: list[int] = []
        # Tokens are decoded together with those just before them: decoders treat a text's start differently.
        self._context_start = 0
        self._num_decoded = 0
        self._held = ""
        self.stop: str | None = None
        """The stop string that has ended the text."""

    def add(self, token_ids: Sequence[int], is_last: bool) -> str:
        """The text that these tokens make certain."""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._context_start : self._num_decoded])
        text = self._decode(self._token_ids[self._context_start :])
        if not is_last and (len(text) <= len(before) or text.endswith(REPLACEMENT_CHARACTER)):
            return ""
        self._context_start, self._num_decoded = self._num_decoded, len(self._token_ids)
        return self._cut(self._held + text[len(before) :], is_last)

    def _cut(self, text: str, is_last: bool) -> str:
        if self.stop is not None:
            return ""
        kept, self.stop = before_stop(text, self._stops)
        if is_last or self.stop is not None:
            return kept
        end = len(text) - num_held(text, self._stops)
        self._held = text[end:]
        return text[:end]


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that one: the token ids keep it, OpenAI's answers do not."""
    found = ((text.index(stop), -len(stop), stop) for stop in stops if stop in text)
    end, _, stop = min(found, default=(len(text), 0, None))
    return text[:end], stop


class GrowingThought:
    """Sorts the text of an answer that comes in pieces into thoughts and the rest, as ``split_thought`` does.

    The marks themselves are left out. Held back is what may be the beginning of one, and a mark of which the
    text so far does not show whether it is quoted.

    Args:
        prompt_end: the last characters of the prompt, which may have opened a thought.
    """

    def __init__(self, prompt_end: str) -> None:
        self._mark = opened_thought(prompt_end)  # of the thought that is open
        self._text = ""
        self._start = 0  # of what may hold the next mark
        self._num_sent = 0

    def add(self, text: str, is_last: bool) -> tuple[str, str]:
        """The thought and the rest that this piece of the text makes certain."""
        self._text += text
        thought = content = ""
        while True:
            if self._mark:
                found = find_closing(self._text, self._mark, self._start, is_last)
                marks = [MARKS[self._mark]]
            else:
                found, marks = find_opening(self._text, self._start, is_last), list(MARKS)
            end = found.start
            if end == len(self._text) and not is_last:
                end -= num_held(self._text[self._num_sent :].lower(), map(str.lower, marks))
            part = self._text[self._num_sent : end]
            thought, content = (thought + part, content) if self._mark else (thought, content + part)
            self._start, self._num_sent = found.resume, end
            if not found.is_found:
                return thought, content
            self._num_sent = found.end
            self._mark = "" if self._mark else found.mark


class WholeThought:
    """Thought like ``GrowingThought``, where only the whole answer shows what is a thought.

    Args:
        prompt_end: the last characters of the prompt, which may have opened a thought.
        split: separates the thought of a text from its answer.
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
