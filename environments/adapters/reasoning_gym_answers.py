r"""Exceptions in which reasoning-gym's verifiers are not taken at their word, for ``reasoning_gym``.

``is_data`` says which answers they may evaluate: those that are data, and no program. Some give an answer to
Python's ``eval``, or to sympy's ``parse_expr``, which rewrites it a little and then does the same. Code that
runs where a verdict is made can make any verdict, whatever is shut off around that process. So an answer of
another form than the question asks for is never given to them.

``checked_reward`` corrects the rewards that an answer earns without a look at the question.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any

from environments.syntax_tree import parse_expression

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
    """Return whether ``eval`` cannot read it, or reads nothing but numbers, texts and lists of them."""
    if answer == entry["answer"]:  # they are compared first
        return True
    try:
        tree = parse_expression(answer.lstrip(" \t"))  # as eval does
    except (SyntaxError, ValueError):
        return True
    except (MemoryError, RecursionError):
        return False
    try:
        ast.literal_eval(tree)
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
    """Return whether all its names are elementary functions, or stand in the library's own answer too."""
    names = set(_WORD.findall(answer))
    return bool(_FORMULA.fullmatch(answer)) and names <= _FUNCTIONS.union(_WORD.findall(entry["answer"]))


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
    """Return whether the verifier of ``dataset`` can be given ``answer`` without running a program."""
    check = EVALUATED.get(dataset)
    return check is None or check(answer, entry)


NEAR_IS_WRONG = {"game_of_life", "mini_sudoku", "propositional_logic", "rectangle_count", "time_intervals"}
"""The datasets where one and the same answer is near enough to many right ones to earn more than 0.2 on
average: an empty board, a square of numbers, a tautology, 5, noon. There only a full score is paid."""


def _is_probability(answer: str, entry: Entry) -> bool:
    """The verifier of coin_flip pays 0 in full, since each right answer begins with that digit."""
    with suppress(ValueError, ZeroDivisionError):
        right = Fraction(entry["answer"])
        return abs(Fraction(answer.replace(",", "")) - right) <= min(Fraction(1, 10_000), right / 20)
    return False


def _is_truth(answer: str, entry: Entry) -> bool:
    """The verifier of game_of_life_halting pays any text, since Python takes a text for true."""
    return answer.strip().lower() == entry["answer"].lower()


JUDGED_HERE: dict[str, Callable[[str, Entry], bool]] = {
    "coin_flip": _is_probability,
    "game_of_life_halting": _is_truth,
}
"""The datasets whose verifiers pay wrong answers in full, and which answers are right."""

_NUMBER_WORD = re.compile(r"\w(?:[\w.]|(?<=[eE])[+-])*")
_NOT_A_NUMBER = re.compile(r"s?nan[0-9]*", re.IGNORECASE)  # as decimal.Decimal reads it too


def checked_reward(dataset: str, answer: str, entry: Entry, reward: float) -> float:
    """The reward that an answer is worth, where its verifier gives ``reward``.

    NaN is near to everything by some verifiers, so an answer with NaN or an infinite number is worth nothing,
    unless the library's own answer has one too.
    """
    if _is_unbounded(answer) and not _is_unbounded(str(entry["answer"])):
        return 0.0
    if dataset in JUDGED_HERE:
        return float(JUDGED_HERE[dataset](answer, entry))
    return 0.0 if dataset in NEAR_IS_WRONG and reward < 1 else reward


def _is_unbounded(answer: str) -> bool:
    """Return whether a word in it is read as NaN or an infinite number, also once spaces are removed."""
    for word in _NUMBER_WORD.findall(answer) + _NUMBER_WORD.findall("".join(answer.split())):
        number = word.rstrip("ijIJ")  # of an imaginary one
        if _NOT_A_NUMBER.fullmatch(number):
            return True
        with suppress(ValueError):
            if not number.isdecimal() and not math.isfinite(float(number)):
                return True
    return False
