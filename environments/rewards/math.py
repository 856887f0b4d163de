r"""The reward for mathematics: is the last ``\boxed{...}`` the expected answer?"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import isfinite
from numbers import Integral, Real
from typing import Any

from environments.errors import DatasetError
from environments.rewards.base import RewardOutput, lacking
from environments.rewards.matching import calculation, may_be_equal, same
from environments.rewards.reading import last_boxed, read
from environments.sandbox.grader import Grader, GradingError
from environments.thoughts import split_thought

TIME_LIMIT_SECONDS = 10.0
"""Time limit of comparing two expressions; an answer that takes longer, such as 10^{10^{10}}, is wrong."""

_grader = Grader("environments.rewards.expressions:equal_answers", imports=["math_verify"])


def math_reward_fn(
    task_info: dict[str, Any], action: str, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> RewardOutput:
    r"""Reward 1 if the answer equals ``task_info["ground_truth"]``, else 0.

    The answer is the last ``\boxed{...}`` with balanced braces outside of its thoughts; there is no
    other way to give one. The ground truth is a text, a number, or a list of these of which any will do.

    *Notation.* LaTeX, plain text (2*pi, sqrt(3)/2, x**2), Unicode (x², √3, ∞, x₁, ½) and Markdown around
    it (**42**) are read alike. So are repeating decimals: 0.\overline{42}, 0.\dot{3}, 0.1(6), 0.333...

    *Numbers* are compared exactly: 0.50, 1/2 and \frac{1}{2} are equal, and so are 1,000 and 1000, 1 1/2 and
    1.5, 2e3 and 2\times10^3. A percent sign at the end is a unit: 50\% is 50. A \text{...} is one too, with
    its power, and so are degrees, a word that stands apart from its number (5 dollars, 5 m/s; in 5t and 5 xy
    letters are symbols), and the base in 101_2: a missing one does not matter, another one does. A decimal
    that stands for an irrational number may differ from it by 5e-7 of its value; all others, however small,
    have to agree to two hundred digits.

    *Words* are compared as text, in upper or lower case.

    *Lists.* Tuples, lists, matrices and intervals have order and multiplicity, sets have not. A list with
    dots is compared as it is written. Each item is compared like an answer of its own.

    *Expressions.* Math-verify decides, in a process of its own that gets ``time_limit_seconds``. Where it
    has a mind of its own, this is kept: a bare list (1, -2) has multiplicity and no order, since most of
    them are the solutions of an equation, and may stand for a set, or in order for a tuple; x = 3 and
    x \in \{3\} may stand for 3; a set may stand for an inequality, and no inequality for a set;
    3:4 is 3/4, \log is to the base 10, \gamma is Euler's constant, and the degrees of an angle do not count.

    *Calculations.* Math-verify would also do the calculation that the task asks for. So an answer with an
    operator such as \sum, \int, \lim, \gcd or \frac{d}{dx} is wrong unless the ground truth has it too. And
    where the ground truth is a number, or an item of it is, anything but a number is wrong, in any form:
    products, nested fractions, absolute values, logarithms, \Gamma. Three forms cannot be told from an
    answer and may stay: a fraction, a power and a root of plain numbers (6/8, 2^{10}, \sqrt{16}), but not one
    that changes nothing (10^1, 5^0, \sqrt[1]{10}). So may an equation that has the result itself on one side,
    unless it is false (8 = 10); its sides may differ by a hundredth where one is a decimal.

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
    if any(same(reading, read(truth)) for truth in truths):
        return RewardOutput(1.0, metadata, is_correct=True)
    open_truths = [truth for truth in truths if may_be_equal(reading, read(truth))]
    if not open_truths:
        return RewardOutput(0.0, metadata, is_correct=False)
    calculations = [calculation(answer, truth) for truth in open_truths]
    if all(calculations):
        error = f"The answer leaves a calculation to be done ({calculations[0]!r}): box its result instead."
        return RewardOutput(0.0, {**metadata, "error": error}, is_correct=False)
    open_truths = [truth for truth, found in zip(open_truths, calculations, strict=True) if not found]
    metadata["judged_by"] = "math-verify"
    try:
        correct = _grader.call(open_truths, answer, time_limit_seconds=time_limit_seconds)
    except GradingError as error:
        return RewardOutput(0.0, {**metadata, "error": f"The answer {error}"}, is_correct=False)
    return RewardOutput(float(correct), metadata, is_correct=correct)


def expected_texts(truths: Any) -> list[str]:
    """Return the expected answers in a text, a number, or a list of these, without empty ones.

    Raises:
        DatasetError: one is of another type, such as a dict: no answer could ever equal its text.
    """
    truths = truths if isinstance(truths, list | tuple) else [truths]
    for truth in truths:
        is_number = isinstance(truth, Integral) or (isinstance(truth, Real | Decimal) and isfinite(truth))
        if not (truth is None or isinstance(truth, str) or is_number):
            raise DatasetError(f"The task expects {truth!r}: no answer can equal it. Use texts or numbers.")
    return [str(truth) for truth in truths if truth is not None and str(truth).strip()]


def _ground_truths(task_info: dict[str, Any]) -> list[str]:
    texts = expected_texts(task_info.get("ground_truth"))
    insides = [boxed if (boxed := last_boxed(text)) is not None else text for text in texts]
    truths = [inside for inside in insides if read(inside).value != ""]
    if not truths:
        raise lacking(task_info, "'ground_truth' that says something", "add the expected answer.")
    return truths
