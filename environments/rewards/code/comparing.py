"""Compares what a program printed or returned with what is expected. Used by the reward for programs."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from environments.rewards.code.large_json import read_json

_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")


def same_output(got: str, expected: str) -> bool:
    """Compare line by line, without trailing blanks and empty lines; numbers with a tolerance."""
    ours, theirs = _lines(got), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(got: Any, expected: Any) -> bool:
    """Compare plain JSON values, floats with a tolerance."""
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[key], expected[key]) for key in expected)
    if isinstance(got, float) or isinstance(expected, float):
        numbers = isinstance(got, int | float) and isinstance(expected, int | float)
        near = _near if isinstance(expected, int) else _close
        return numbers and (got == expected or near(got, expected) or (got != got and expected != expected))
    return bool(got == expected)


def same_result(text: str, expected: Any) -> bool:
    """Compare the JSON text of a result with the expected value."""
    try:
        got = read_json(text)
        # TACO and APPS write a result as a list of one.
        wrapped = isinstance(expected, list) and len(expected) == 1
        return same_value(got, expected) or (wrapped and same_value(got, expected[0]))
    except (ValueError, RecursionError):  # the solution can write the text, so it may be anything
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(got: str, expected: str) -> bool:
    if got == expected:
        return True
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return False
    if expected.lstrip("+-").isdigit():
        return not got.lstrip("+-").isdigit() and _near(got, expected)
    return _close(float(got), float(expected))


def _near(got: float | str, expected: int | str) -> bool:
    """Return whether a number with a point or an exponent equals the expected integer, however large."""
    number = Decimal(got)
    return number.is_finite() and abs(number - Decimal(expected)) <= _TOLERANCE


def _close(got: float, expected: float) -> bool:
    try:
        finite = math.isfinite(got) and math.isfinite(expected)
        return finite and math.isclose(got, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False
