"""The guard of a chat: where a text has the name of a control token, it stays text."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GUARD = "\ufdd0"
"""Stands in a rendered text where a control token's name must not become the token. Unicode keeps this
character out of all texts."""
SPACE = "▁"
"""Mark with which tokenizers of SentencePiece's kind write a space."""

WORDS = {
    *("type", "function", "name", "description", "parameters", "properties", "required"),
    *("arguments", "role", "content"),
}
"""Words by which templates look something up: with a guard they would not find it."""


class Guard:
    """Cuts the names of a tokenizer's added tokens in two, wherever they stand in texts of strangers.

    All added tokens count, whether the tokenizer calls them special or not: turns, tool calls and thoughts
    begin and end with either kind. Only white space is no name. Names are found as the tokenizer itself finds
    them, after its normalization.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import AddedToken, Tokenizer, models

        tokens = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        special = {name: AddedToken(name, normalized=False) for name in tokenizer.all_special_tokens}
        names = [token for name, token in (special | tokens).items() if _is_name(name)]
        # All other text is one unknown token: so it takes a small part of an encoding's time.
        self._finder = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        if tokenizer.is_fast:
            self._finder.normalizer = tokenizer.backend_tokenizer.normalizer
        self._finder.add_tokens(names)
        self._beginnings = {name.content[:size] for name in names for size in range(1, len(name.content))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._endings = tuple({end for name in names for end in _endings(name.content)})
        self._insides = {inside for end in self._endings for inside in _beginnings(end)} - WORDS

    def guarded(self, value: Any, but: Collection[str] = ()) -> Any:
        """The text, or all texts in a value of JSON, each name with a guard, but for those in ``but``."""
        if isinstance(value, str):
            return self._closed(self._cut(value, but))
        if isinstance(value, dict):
            return {self.guarded(name): self.guarded(each, but) for name, each in value.items()}
        return [self.guarded(each, but) for each in value] if isinstance(value, (list, tuple)) else value

    def _cut(self, text: str, but: Collection[str]) -> str:
        """The text with a guard in each name; again, until no name is left that overlapped another."""
        cuts = [0]
        found = self._finder.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            name = text[start:end]
            inside = end - len(name.lstrip()) + 1  # a name may have taken the white space before it
            if token_id and name not in but and inside < end:
                cuts.append(inside)
        if len(cuts) == 1:
            return text
        pieces = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        return self._cut(GUARD.join(pieces), but)

    def _closed(self, text: str) -> str:
        """The text, with a guard where a name begins at its end or goes on at its start: another text may
        complete it, or what a template writes around it, as in ``<{{ key }}>``.
        """
        if text.lstrip().startswith(self._endings):
            text = GUARD + text
        body = text.rstrip()
        if body.lstrip() in self._insides:
            return body + GUARD + text[len(body) :]
        for size in range(1, min(self._longest, len(body)) + 1):
            if body[-size:] in self._beginnings:
                return body + GUARD + text[len(body) :]
        return text


def _endings(name: str) -> list[str]:
    """The name without some of the signs with which it begins: ``|im_end|>`` and ``im_end|>``."""
    num_signs = next((index for index, char in enumerate(name) if char.isalnum()), 0)
    return [name[size:] for size in range(1, num_signs + 1)]


def _beginnings(name: str) -> list[str]:
    """The name without some of the signs with which it ends."""
    return [end[::-1] for end in _endings(name[::-1])]


def _is_name(token: str) -> bool:
    return len(token) > 1 and bool(token.replace(SPACE, " ").strip())
