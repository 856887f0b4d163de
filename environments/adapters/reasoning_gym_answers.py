r"""Which answers the verifiers of reasoning-gym may evaluate: those that are data, and no program.

These verifiers give an answer to Python's ``eval``, or to sympy's ``parse_expr``, which rewrites it a little
and then does the same. Code that runs where a verdict is made can make any verdict, whatever is shut off
around that process. So an answer of another form than the question asks for is never given to them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]
"""A question of reasoning-gym with its ``answer`` and ``metadata``."""

_ARITHMETIC = re.compile(r"(?:[0-9+\-() ]|\*(?!\*)|/(?!/))*")
"""Whole numbers, the four operators and parentheses. No ``9e1``: countdown would not count it as a number."""
_FORMULA = re.compile(r"(?:[-+*/(), ]|[0-9]++(?:\.[0-9]++)?+|[A-Za-z_]\w*+)*+", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FUNCTIONS = {
    *("Abs", "E", "I", "Rational", "exp", "ln", "log", "pi", "sqrt"),
    *("cos", "cot", "csc", "sec", "sin", "tan", "acos", "acot", "acsc", "asec", "asin", "atan"),
    *("cosh", "coth", "sinh", "tanh", "acosh", "acoth", "asinh", "atanh"),
}
"""Names of sympy for a formula. None that would solve the question, such as ``integrate`` or ``expand``."""


def _is_literal(answer: str, entry: Entry) -> bool:
    """Whether ``eval`` cannot read it, or reads nothing but numbers, texts and lists of them."""
    if answer == entry["answer"]:  # they are compared first
        return True
    try:
        ast.parse(answer.lstrip(" \t"), mode="eval")  # as eval does
    except (SyntaxError, ValueError):
        return True
    except (MemoryError, RecursionError):
        return False
    try:
        ast.literal_eval(answer)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_arithmetic(answer: str, entry: Entry) -> bool:
    return _ARITHMETIC.fullmatch(answer) is not None


def _is_arithmetic_of_its_numbers(answer: str, entry: Entry) -> bool:
    """The verifier of puzzle24 does not check which numbers are used: 1*2*3*4 would solve every puzzle."""
    given = sorted(map(str, entry["metadata"]["numbers"]))
    return _is_arithmetic(answer, entry) and sorted(re.findall(r"[0-9]+", answer)) == given


def _is_formula(answer: str, entry: Entry) -> bool:
    """Whether all its names are elementary functions, or stand in the library's own answer too."""
    names = set(_WORD.findall(answer))
    return _FORMULA.fullmatch(answer) is not None and names <= _FUNCTIONS.union(
        _WORD.findall(entry["answer"])
    )


EVALUATED: dict[str, Callable[[str, Entry], bool]] = {
    "binary_matrix": _is_literal,
    "countdown": _is_arithmetic,
    "intermediate_integration": _is_formula,
    "n_queens": _is_literal,
    "polynomial_multiplication": _is_formula,
    "puzzle24": _is_arithmetic_of_its_numbers,
    "simple_integration": _is_formula,
    "spiral_matrix": _is_literal,
    "string_insertion": _is_literal,
}
"""The datasets whose verifiers evaluate answers, and which of them are data."""


def is_data(dataset: str, answer: str, entry: Entry) -> bool:
    """Whether the verifier of ``dataset`` can be given ``answer`` without running a program."""
    check = EVALUATED.get(dataset)
    return check is None or check(answer, entry)
