"""Compares two single answers as they are read, without an algebra system."""

from __future__ import annotations

import re
from fractions import Fraction

from environments.rewards.notation import MAX_LENGTH
from environments.rewards.reading import Reading, compact_text, may_be_unit, plain_text, read, without_unit

_D = r"(?:d|\\partial|\\mathrm ?\{d\})"
_OPERATOR = re.compile(
    r"\\(?:operatorname\*? ?\{ ?)?(sum|prod|i*int|oint|lim|limsup|liminf|gcd|lcm|max|min|det|mod)(?![a-zA-Z])"
    rf"|\\frac ?\{{? ?{_D}[^{{}}]*\}}? ?\{{ ?{_D} ?[a-zA-Z]"
)
"""Operators that ask for a calculation, also where the answer is an expression."""
_PLAIN = r"\{?\(?-?(?:\d+\.?\d*|\.\d+)\)?\}?"
_POWER_OR_ROOT = re.compile(rf"[+-]?(?:{_PLAIN}(?:\^\{{?{_PLAIN})+\}}*|\\sqrt(?:\[\d+\])?{_PLAIN})")
"""Forms that cannot be told from a number that is given as an answer."""
_0_OR_1 = r"\+?0*[01](?:\.0*)?"
_TRIVIAL = re.compile(
    rf"\^[{{(]*{_0_OR_1}(?![\d.])|^[+-]?[{{(]*-?{_0_OR_1}[)}}]*\^|\\sqrt\[0*1\]|\\sqrt(?:\[\d+\])?[{{(]*{_0_OR_1}[)}}]*$"
)
"""Powers and roots that change nothing, or come to 0 or 1 whatever else they say: nobody's result."""


def same(answer: Reading, truth: Reading) -> bool:
    """Return whether two answers are equal as numbers or texts, and their units do not differ."""
    if _are_words(answer.value, truth.value):
        return str(answer.value).casefold() == str(truth.value).casefold()
    return answer.value == truth.value and not _endings_differ(answer, truth)


def may_be_equal(answer: Reading, truth: Reading) -> bool:
    """Return whether two texts that differ may still be equal as expressions."""
    if isinstance(answer.value, Fraction) and isinstance(truth.value, Fraction):
        return False
    texts = str(answer.value), str(truth.value)
    if not all(0 < len(text) <= MAX_LENGTH for text in texts) or _are_words(*texts):
        return False
    # math-verify drops the texts at the end, even where they are the answer.
    if _endings_differ(answer, truth) or not (may_be_unit(answer.ending) and may_be_unit(truth.ending)):
        return False
    # x and X are two symbols.
    return texts[0].casefold() != texts[1].casefold()


def calculation(answer: str, truth: str) -> str | None:
    """Return what ``answer`` leaves to be calculated, and ``truth`` does not, or None."""
    plain, reading = plain_text(answer), read(truth.rpartition("=")[2])
    exact, *nearly = re.split(r"\\approx(?![a-z])", plain)
    sides = [side for side in re.split(r"=|\\(?:equiv|in)(?![a-z])", exact) if side.strip()]
    if any(same(read(side), reading) for side in sides + nearly):
        return None
    allowed = set(_OPERATOR.findall(plain_text(truth)))
    operator = next((found for found in _OPERATOR.finditer(plain) if (found[1] or "") not in allowed), None)
    if operator is not None:
        return operator[0]
    if not isinstance(reading.value, Fraction) or (sides and _is_number(sides[-1])):
        return None
    return plain


def _is_number(plain: str) -> bool:
    """Return whether a text is a number, or a power or a root of one, and no calculation."""
    bare = re.sub(r"^(?:\(|\[|\\\{)+|(?:\)|\]|\\\})+$", "", without_unit(plain).strip())
    compact = compact_text(bare)
    is_form = bool(_POWER_OR_ROOT.fullmatch(compact)) and not _TRIVIAL.search(compact)
    return isinstance(read(bare).value, Fraction) or is_form


def _endings_differ(answer: Reading, truth: Reading) -> bool:
    """Return whether both have a unit, and different ones: a missing unit is no difference."""
    units = [sorted(re.sub(r"(?<=\w\w)s\b| ", "", side.ending)) for side in (answer, truth)]
    return all(units) and units[0] != units[1]  # sorted, since the words may be factors: 5ab is 5ba


def _are_words(*sides: Fraction | str) -> bool:
    """Return whether both are words. For math-verify they are products of letters: "no" would equal "on"."""
    return all(isinstance(side, str) and len(side) > 1 and side.isalpha() for side in sides)
