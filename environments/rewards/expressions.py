"""Compares expressions by math-verify and sympy, which a grading process imports and nobody else."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import cache
from typing import Any

from environments.rewards.lists import DOTS, equal_lists, listed
from environments.rewards.matching import calculation, may_be_equal, same
from environments.rewards.reading import plain_text, read, without_unit

DECIMAL_TOLERANCE = "5e-7"
"""Largest distance of a decimal from an irrational number, relative to it: seven digits always do."""
EXACT_TOLERANCE = "1e-200"
"""Largest difference of two exact numbers that are the same, relative to the larger one."""
_DIGITS = 220
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_INDEX = re.compile(r"_\{? ?i(?![a-zA-Z])|(?<![a-zA-Z\\])i ?=")
"""The letter i counts in a_i and in sums over i=1 to n; elsewhere it is a number."""
_ARITHMETIC = re.compile(r"(?:[\d\s.+*/^!(){}|-]|\\(?:frac|sqrt|cdot|times|div|binom|pi)(?![a-zA-Z]))+")
_EQUALS = re.compile(r":?=|\\(?:equiv|approx)(?![a-z])")
_ROUNDING = 0.01
"""Largest distance of the sides of an equation that has a decimal in it, relative to the larger one."""


def equal_answers(truths: list[str], answer: str) -> bool:
    """Return whether ``answer`` equals any of ``truths``; it may run for ever."""
    return any(_equal(truth, answer) for truth in truths)


def _equal(truth: str, answer: str) -> bool:
    expected, given = listed(truth), listed(answer)
    if expected and given:
        return equal_lists(expected, given, _equal_items)
    if _is_false_equation(answer):
        return False
    for side, other in ((expected, answer), (given, truth)):
        if side is not None and side.is_interval and _is_value(other):
            return False
    if any(side is not None and side.is_no_value for side in (expected, given)):
        return False
    if any(DOTS in plain_text(text) for text in (truth, answer)):
        return False
    return any(_verify(left, right) for left in _expressions(truth) for right in _expressions(answer))


def _is_false_equation(text: str) -> bool:
    """Return whether a text states that two numbers are equal which are not, as 8 = 10."""
    plain = plain_text(text)
    if r"\pmod" in plain or not _EQUALS.search(plain):
        return False
    is_rough = r"\approx" in plain or bool(re.search(r"\d\.\d", plain))
    sides = [read(side) for side in _EQUALS.split(plain)]
    values = [_number(side.value) for side in sides if not side.ending]
    values = [value for value in values if value is not None]
    return not all(
        equal_values(values[0], value)
        or (is_rough and abs(values[0] - value) <= _ROUNDING * max(abs(values[0]), abs(value)))
        for value in values[1:]
    )


def _number(value: Fraction | str) -> Any:
    """Return the number that plain arithmetic comes to, or None for anything else."""
    from sympy import Rational

    if isinstance(value, Fraction):
        return Rational(value.numerator, value.denominator)
    parsed = _parsed(value) if _ARITHMETIC.fullmatch(value) else None
    if parsed is None or not getattr(parsed, "is_number", False):
        return None
    return parsed if parsed.is_finite else None


def _is_value(text: str) -> bool:
    """Return whether a text is a single number, which no interval equals, not even one of length 0."""
    return any(getattr(each, "is_number", False) for each in _expressions(text))


def _equal_items(truth: str, answer: str) -> bool:
    readings = read(answer), read(truth)
    if same(*readings):
        return True
    return may_be_equal(*readings) and calculation(answer, truth) is None and _equal(truth, answer)


def _expressions(text: str) -> list[Any]:
    """The expressions that a text may mean: with the word at its end, for it may be symbols, and without."""
    plain = plain_text(text)
    parsed = map(_parsed, dict.fromkeys([plain, without_unit(plain)]))
    return [expression for expression in parsed if expression is not None]


def _parsed(plain: str) -> Any:
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex

    # Its own list of units has single letters, with which 60t would be 60.
    config = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    latex = normalize_latex(plain, config)
    if not _INDEX.search(latex):
        latex = _IMAGINARY.sub("I", latex)
    for text in dict.fromkeys([latex, latex.rpartition("=")[2]]):
        try:
            return latex2sympy(
                text,
                is_real=not should_treat_as_complex(_IMAGINARY.sub("", text)),
                normalization_config=None,
                conversion_config=ConversionConfig(lowercase_symbols=False),
            )
        except Exception:  # noqa: BLE001  (its parser raises nothing more precise)
            continue
    return None


def _verify(truth: Any, answer: Any) -> bool:
    # Its own time limits are signals, and Python cannot always handle these in time.
    return bool(_verifier().verify(truth, answer, timeout_seconds=None))


@cache
def _verifier() -> Any:
    """math-verify's module of rules, with our comparison of values in place of its own.

    Its own rounds to so many decimals, so that all tiny numbers are equal, and takes two equations without
    solutions for the same. No argument of it changes that.
    """
    from math_verify import grader

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set
    equal_symbolically, solve = grader.sympy_symbolic_eq, grader.solve

    def solutions(*arguments: Any) -> Any:
        found = solve(*arguments)
        if not found:
            raise ValueError("There are no solutions to compare.")
        return found

    rules: Any = grader
    rules.solve = solutions
    rules.sympy_numeric_eq = lambda one, other, *digits: equal_values(one, other)
    rules.sympy_symbolic_eq = lambda one, other: equal_symbolically(_exact(one), _exact(other))
    return rules


def equal_values(one: Any, other: Any) -> bool:
    """Return whether two numbers are equal: exactly, or nearly for a decimal and an irrational one."""
    from sympy import Float, MatrixBase, Rational

    done = one.doit(), other.doit()
    if all(isinstance(side, MatrixBase) for side in done):
        return done[0].shape == done[1].shape and all(map(equal_values, done[0].flat(), done[1].flat()))
    has_decimal = any(isinstance(side, Float) for side in done)
    one, other = _exact(one).doit(), _exact(other).doit()
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    one, other = one.evalf(_DIGITS), other.evalf(_DIGITS)
    if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
        return bool(one == other)
    tolerance = Rational(DECIMAL_TOLERANCE if has_decimal else EXACT_TOLERANCE)
    return bool(abs(one - other) <= tolerance * max(abs(one), abs(other)))


def _exact(expression: Any) -> Any:
    from sympy import Float, Rational

    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
