r"""The reward for mathematics: is the last ``\boxed{...}`` the expected answer?"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from numbers import Integral, Real
from typing import Any

from environments.errors import DatasetError
from environments.rewards.base import RewardOutput
from environments.rewards.boxed import last_boxed
from environments.rewards.reading import (
    MAX_LENGTH,
    POWER_OF_TEN,
    Reading,
    compact_text,
    in_latex,
    may_be_unit,
    plain_text,
    read,
    without_end,
    without_unit,
)
from environments.sandbox.grader import Grader, GradingError
from environments.thoughts import split_thought

TIME_LIMIT_SECONDS = 10.0
"""For comparing two expressions; an answer that takes longer, such as 10^{10^{10}}, is wrong."""

_D = r"(?:d|\\partial|\\mathrm ?\{d\})"
_OPERATOR = re.compile(
    r"\\(?:operatorname\*? ?\{ ?)?(sum|prod|i*int|oint|lim|limsup|liminf|gcd|lcm|max|min|det|mod)(?![a-zA-Z])"
    rf"|\\frac ?\{{? ?{_D}[^{{}}]*\}}? ?\{{ ?{_D} ?[a-zA-Z]"
)
"""What asks for a calculation, also where the answer is an expression."""
_ARITHMETIC = re.compile(
    r"(?<=[\d.)!%])(?:[-+*]|\\times|\\cdot)(?=[-+]?(?:[\d.(]|\\))"
    r"|\\(?:log|ln|lg|arc|sin|cos|tan|cot|sec|csc|[dt]?binom|choose)|!"
)
"""What asks for a calculation where the answer is a number: joined numbers, functions and factorials."""
_grader = Grader("environments.rewards.math:equal_expressions", imports=["math_verify"])


def math_reward_fn(
    task_info: dict[str, Any], action: str, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> RewardOutput:
    r"""Reward 1 if the answer equals ``task_info["ground_truth"]``, else 0.

    The answer is the last ``\boxed{...}`` with balanced braces outside of the thoughts; there is no
    other way to give one. The ground truth is a text, a number, or a list of these of which any will do.
    Numbers are compared exactly: 0.50, 1/2 and \frac{1}{2} are equal, and so are 1,000 and 1000, 1 1/2 and
    1.5, 2e3 and 2\times10^3. A percent sign at the end is a unit: 50\% is 50. A \text{...} is one too, with
    its power, and so is a word that stands apart from its number (5 dollars, 5 m/s; in 5t and 5 xy letters
    are symbols), and the base in 101_2: a missing one does not matter, another one does. Words are compared
    as text, in upper or lower case. Two that are not equal as numbers or texts are expressions, and
    math-verify decides, which rounds irrational
    numbers to six decimals. It runs in a process of its own for at most ``time_limit_seconds``.

    math-verify would also do the calculation that the task asks for. So an answer with an operator such as
    \sum, \int, \lim, \gcd or \frac{d}{dx} is wrong unless the ground truth has it too; and where that is a
    number, so is one that joins numbers by +, -, *, \times or \cdot, or has a logarithm, an angle's
    function, a binomial coefficient or a factorial. 1/2, 2^{10} and \sqrt{16} may stay, and so may an
    equation that ends with the result.

    An answer that could not be graded, or leaves a calculation, is wrong, and ``metadata["error"]`` says why.
    ``metadata["judged_by"]`` is "number", "text" or "math-verify".

    Raises:
        DatasetError: the task has no ground truth, or one of another type.
        EnvironmentFailure: math-verify cannot be run at all.
    """
    truths = _ground_truths(task_info)
    answer = last_boxed(split_thought(action)[1])
    if answer is None:
        reason = r"The answer holds no complete \boxed{...}."
        return RewardOutput(0.0, {"answer": None, "error": reason}, is_correct=False)
    reading = read(answer)
    judged_by = "number" if isinstance(reading.value, Fraction) else "text"
    metadata = {"answer": answer, "judged_by": judged_by}
    if any(_same(reading, read(truth)) for truth in truths):
        return RewardOutput(1.0, metadata, is_correct=True)
    open_truths = [truth for truth in truths if _is_open(reading, read(truth))]
    if not open_truths:
        return RewardOutput(0.0, metadata, is_correct=False)
    calculations = [_calculation(answer, truth) for truth in open_truths]
    if all(calculations):
        error = f"The answer leaves a calculation to be done ({calculations[0]!r}): box its result instead."
        return RewardOutput(0.0, {**metadata, "error": error}, is_correct=False)
    open_truths = [truth for truth, found in zip(open_truths, calculations, strict=True) if not found]
    metadata["judged_by"] = "math-verify"
    try:
        given = [expression for truth in open_truths for expression in _expressions(truth)]
        correct = _grader.call(given, _expressions(answer), time_limit_seconds=time_limit_seconds)
    except GradingError as error:
        return RewardOutput(0.0, {**metadata, "error": f"The answer {error}"}, is_correct=False)
    return RewardOutput(float(correct), metadata, is_correct=correct)


def _expressions(text: str) -> list[str]:
    """The expressions that a text may mean: with the word at its end, for it may be symbols, and without."""
    expression = without_end(in_latex(text))
    return list(dict.fromkeys([expression, without_unit(expression)]))


def equal_expressions(truths: list[str], answers: list[str]) -> bool:
    """Whether math-verify finds any of ``answers`` equal to any of ``truths``; it may run for ever."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex = LatexExtractionConfig(
        # Its own list of units has single letters, with which 60t would be 60.
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True)
    )
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set

    def parsed(expression: str) -> list[Any]:
        configs = [latex, ExprExtractionConfig()]
        return parse(rf"\boxed{{{expression}}}", configs, parsing_timeout=None)

    # Its own time limits are signals, and Python cannot always handle these in time.
    targets = [parsed(answer) for answer in answers]
    return any(verify(parsed(truth), target, timeout_seconds=None) for truth in truths for target in targets)


def expected_texts(truths: Any) -> list[str]:
    """Return the expected answers in a text, a number, or a list of these, without empty ones.

    Raises:
        DatasetError: one is of another type, such as a dict: no answer could ever equal its text.
    """
    truths = truths if isinstance(truths, list | tuple) else [truths]
    for truth in truths:
        is_number = isinstance(truth, Integral) or (isinstance(truth, Real | Decimal) and isfinite(truth))
        if not (truth is None or isinstance(truth, str) or is_number):
            raise DatasetError(
                f"The task expects {truth!r}, which no answer can equal: use a text, a number, or a list "
                "of these."
            )
    return [str(truth) for truth in truths if truth is not None and str(truth).strip()]


def _ground_truths(task_info: dict[str, Any]) -> list[str]:
    texts = expected_texts(task_info.get("ground_truth"))
    insides = [boxed if (boxed := last_boxed(text)) is not None else text for text in texts]
    truths = [inside for inside in insides if read(inside).value != ""]
    if not truths:
        keys = ", ".join(sorted(task_info)) or "none"
        raise DatasetError(
            f"The task has no 'ground_truth' that says something (its keys: {keys}): add the expected answer."
        )
    return truths


def _calculation(answer: str, truth: str) -> str | None:
    """What ``answer`` leaves to be calculated, and ``truth`` does not, or None."""
    plain, reading = plain_text(answer), read(truth.rpartition("=")[2])
    if "=" in plain and _same(read(plain.rpartition("=")[2]), reading):
        return None
    allowed = set(_OPERATOR.findall(plain_text(truth)))
    operator = next((found for found in _OPERATOR.finditer(plain) if (found[1] or "") not in allowed), None)
    if operator is not None or not isinstance(reading.value, Fraction):
        return operator[0] if operator else None
    compact = re.sub(r"\^\\circ|[{}]", "", re.sub(POWER_OF_TEN, "1", compact_text(plain)))
    arithmetic = _ARITHMETIC.search(compact)
    return arithmetic[0] if arithmetic else None


def _same(answer: Reading, truth: Reading) -> bool:
    if _are_words(answer.value, truth.value):
        return str(answer.value).casefold() == str(truth.value).casefold()
    return answer.value == truth.value and not _endings_differ(answer, truth)


def _is_open(answer: Reading, truth: Reading) -> bool:
    """Whether two texts that differ may still be equal as expressions."""
    if isinstance(answer.value, Fraction) and isinstance(truth.value, Fraction):
        return False
    texts = str(answer.value), str(truth.value)
    if not all(0 < len(text) <= MAX_LENGTH for text in texts) or _are_words(*texts):
        return False
    # math-verify drops the texts at the end, even where they are the answer.
    if _endings_differ(answer, truth) or not (may_be_unit(answer.ending) and may_be_unit(truth.ending)):
        return False
    # x and X are two symbols, math-verify takes them for one.
    return texts[0].casefold() != texts[1].casefold()


def _endings_differ(answer: Reading, truth: Reading) -> bool:
    """Whether both have a unit, and different ones: a missing unit is no difference."""
    units = [sorted(re.sub(r"(?<=\w\w)s\b| ", "", side.ending)) for side in (answer, truth)]
    return all(units) and units[0] != units[1]  # sorted, since the words may be factors: 5ab is 5ba


def _are_words(*sides: Fraction | str) -> bool:
    """Whether both are words. For math-verify they are products of letters: "no" would equal "on"."""
    return all(isinstance(side, str) and len(side) > 1 and side.isalpha() for side in sides)
