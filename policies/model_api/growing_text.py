"""The text of a streamed answer, for the OpenAI frontend: pieces that no later token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.model_api.growing_thought import num_held
from policies.model_api.reply import REPLACEMENT_CHARACTER


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
        self._stopped = False

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
        if self._stopped:
            return ""
        kept = before_stop(text, self._stops)
        self._stopped = len(kept) < len(text)
        if is_last or self._stopped:
            return kept
        end = len(text) - num_held(text, self._stops)
        self._held = text[end:]
        return text[:end]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """OpenAI's answers end before the stop string; the token ids keep it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
