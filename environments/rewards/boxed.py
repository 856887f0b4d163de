r"""Finds the answer of a model: the last ``\boxed{...}`` of its text."""

from __future__ import annotations

import re


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces balance, or None."""
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []  # the position of a brace, and whether a box begins there
    for token in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]", text):  # "\{" is a sign, not a brace
        if token[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = start, token.start()
        elif token[0].endswith("{") and token[0] != r"\{":
            open_braces.append((token.end(), token[0] != "{"))
    return text[last[0] : last[1]] if last else None
