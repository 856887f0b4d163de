r"""Takes apart the answers that hold several: lists, tuples, sets, intervals and matrices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from environments.rewards.reading import plain_text, read, without_unit

DOTS = r"\dots"
"""The mark that stands in a list for all that is left out."""

_MATRIX = re.compile(
    r"\(?\[?\\begin\{([bpvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}\)?\]?", re.DOTALL
)
_AND = re.compile(r",? ?(?:\\(?:text|mathrm|mbox) ?\{ ?(?:and|or) ?\}|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z]))")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = {"(": "(", "[": "[", r"\{": "{", "{": "{", r"\langle": "(", r"\lbrace": "{"}
_CLOSING = {")": ")", "]": "]", r"\}": "}", "}": "}", r"\rangle": ")", r"\rbrace": "}"}


class Listed(NamedTuple):
    """An answer that holds several."""

    brackets: str
    """The two brackets, empty for a bare list; for a matrix its height and width."""
    items: tuple[str, ...]
    name: str = ""
    """The text before an equals sign, as in A = (1, 2)."""

    @property
    def is_set(self) -> bool:
        return self.brackets == "{}"

    @property
    def is_interval(self) -> bool:
        """Return whether it may be one, closed or open."""
        return len(self.items) == 2 and self.brackets in ("[]", "()", "[)", "(]")

    @property
    def is_no_value(self) -> bool:
        """Return whether no single expression can equal it, as one equals a set, an interval or a matrix."""
        return self.brackets == "" or (len(self.items) > 2 and self.brackets in ("()", "[]"))


def listed(text: str) -> Listed | None:
    """The answers in ``text``, or None where it is a single one."""
    plain = plain_text(text)
    if matrix := _MATRIX.fullmatch(plain):
        rows = [row.split("&") for row in re.split(r"\\\\|\\cr\b", matrix[2]) if row.strip()]
        cells = tuple(cell.strip() for row in rows for cell in row)
        is_whole = len({len(row) for row in rows}) == 1
        return Listed(f"{len(rows)}x{len(rows[0])}", cells) if is_whole else None
    plain = _AND.sub(",", plain)
    brackets, inside = _enclosed(without_unit(plain))
    items = _items(inside)
    if len(items) > 1 or (brackets == "{}" and inside.strip()):
        return Listed(brackets, tuple(items))
    sides = _split(plain, ("=", r"\in"))
    if len(sides) == 2 and (right := listed(sides[1])):
        return right._replace(name=sides[0])
    return None


def equal_lists(truth: Listed, answer: Listed, equal: Callable[[str, str], bool]) -> bool:
    """Return whether the items are equal, as ``equal`` says of a pair, and stand where they have to."""
    names = {re.sub(r"\s", "", side.name) for side in (truth, answer) if side.name}
    if len(names) > 1 or not _brackets_agree(truth, answer):
        return False
    if truth.is_set and answer.is_set:
        has_all = all(any(equal(item, given) for given in answer.items) for item in truth.items)
        return has_all and all(any(equal(item, given) for item in truth.items) for given in answer.items)
    if len(truth.items) != len(answer.items):
        return False
    if _has_order(truth, answer):
        return all(map(equal, truth.items, answer.items))
    left = list(answer.items)
    for item in truth.items:
        found = next((other for other in left if equal(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _has_order(truth: Listed, answer: Listed) -> bool:
    """Return whether the order counts: in tuples, before dots, and where only one side names its items."""
    sides = truth, answer
    if DOTS in truth.items + answer.items or any(side.brackets not in ("", "{}") for side in sides):
        return True
    names = [{item.partition("=")[0].strip() for item in side.items if "=" in item} for side in sides]
    return max(map(len, names)) > 1 and min(map(len, names)) == 0


def _brackets_agree(truth: Listed, answer: Listed) -> bool:
    pair = truth.brackets, answer.brackets
    if pair[0] == pair[1]:
        return True
    if "" in pair:  # a tuple may be written without them, an interval may not
        return bool({"()", "{}", "[]"} & set(pair)) and not (len(truth.items) == 2 and "[]" in pair)
    if not set(pair) <= {"()", "[]"}:
        return False
    if len(truth.items) != 2:
        return True
    first, second = (read(item).value for item in truth.items)
    return not isinstance(first, str) and not isinstance(second, str) and first > second  # no interval


def _enclosed(plain: str) -> tuple[str, str]:
    """The two brackets around the whole, if there are any, and what is in them."""
    tokens = _TOKEN.findall(plain)
    if len(tokens) < 2 or tokens[0] not in _OPENING or tokens[-1] not in _CLOSING:
        return "", plain
    depth = 0
    for position, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and position < len(tokens) - 1:
            return "", plain
    inside = "".join(tokens[1:-1])
    is_group = tokens[0] == "{"
    return ("", inside) if is_group else (_OPENING[tokens[0]] + _CLOSING[tokens[-1]], inside)


def _items(inside: str) -> list[str]:
    parts = _split(inside, (";",))
    if len(parts) == 1:
        parts = _split(inside, (",",))
    items = [item for part in parts for item in _both_signs(part)]
    return items[:-1] if items and not items[-1] else items


def _both_signs(item: str) -> list[str]:
    if len(re.findall(r"\\pm(?![a-z])", item)) != 1:
        return [item]
    signs = (r"\\pm(?![a-z]) ?", r"\\mp(?![a-z]) ?")
    both = (re.sub(signs[1], other, re.sub(signs[0], one, item)) for one, other in ("+-", "-+"))
    return [re.sub(r"(^|[=(]) ?\+", r"\1", each) for each in both]


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts between the separators that stand outside of all brackets."""
    spaced = ", " in text  # then 1,000, 2,000 are two numbers
    parts, depth, position = [""], 0, 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        position += len(token)
        is_separator = depth == 0 and token in separators
        if is_separator and not (spaced and re.match(r"\d,\d{3}(?!\d)", text[max(position - 2, 0) :])):
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]
