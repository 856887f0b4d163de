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
from environments.rewards.grader import Grader, GradingError

TIME_LIMIT_SECONDS = 10.0
"""For comparing two expressions; an answer that takes longer, such as 10^{10^{10}}, is wrong."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
_MAX_LENGTH = 1000  # longer ones are compared as text: turning them into integers takes too long

_grader = Grader("environments.rewards.math:equal_expressions", imports=["math_verify"])


def math_reward_fn(
    task_info: dict[str, Any], action: str, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> RewardOutput:
    r"""Reward 1 if the answer equals ``task_info["ground_truth"]``, else 0.

    The answer is the last ``\boxed{...}`` with balanced braces after the last ``</think>``; there is no
    other way to give one. The ground truth is a text, a number, or a list of these of which any will do.
    Numbers are compared exactly: 0.50, 1/2 and \frac{1}{2} are equal, and so are 1,000 and 1000. A percent
    sign at the end is a unit: 50\% is 50. Words are compared as text, in upper or lower case. What is
    not equal as a number or a text is an expression, and math-verify decides, which rounds irrational
    numbers to six decimals. It runs in a process of its own for at most ``time_limit_seconds``; an answer
    that could not be graded is wrong, and ``metadata["error"]`` says why. ``metadata["judged_by"]`` is
    "number", "text" or "math-verify".

    Raises:
        DatasetError: the task has no ground truth, or one of another type.
        EnvironmentFailure: math-verify cannot be run at all.
    """
    truths = _ground_truths(task_info)
    answer = last_boxed(action.rpartition("</think>")[2])
    if answer is None:
        reason = r"The answer holds no complete \boxed{...}."
        return RewardOutput(0.0, {"answer": None, "error": reason}, is_correct=False)
    plain = normalised(answer)
    judged_by = "number" if isinstance(plain, Fraction) else "text"
    metadata = {"answer": answer, "judged_by": judged_by}
    if any(_same(plain, normalised(truth)) for truth in truths):
        return RewardOutput(1.0, metadata, is_correct=True)
    open_truths = [truth for truth in truths if _is_open(plain, normalised(truth))]
    if not open_truths:
        return RewardOutput(0.0, metadata, is_correct=False)
    metadata["judged_by"] = "math-verify"
    try:
        given = [_without_end(truth) for truth in open_truths], _without_end(answer)
        correct = _grader.call(*given, time_limit_seconds=time_limit_seconds)
    except GradingError as error:
        return RewardOutput(0.0, {**metadata, "error": f"The answer {error}"}, is_correct=False)
    return RewardOutput(float(correct), metadata, is_correct=correct)


def equal_expressions(truths: list[str], answer: str) -> bool:
    """Whether math-verify finds ``answer`` equal to any of ``truths``; it may run for ever."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set

    def parsed(expression: str) -> list[Any]:
        return parse(rf"\boxed{{{expression}}}", parsing_timeout=None)

    # Its own time limits are signals, and Python cannot always handle these in time.
    target = parsed(answer)
    return any(verify(parsed(truth), target, timeout_seconds=None) for truth in truths)


def last_boxed(text: str) -> str | None:
    r"""Return what is inside the last ``\boxed{...}`` whose braces balance, or None."""
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []  # where each begins, and whether a box does
    for token in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]", text):  # "\{" is a sign, not a brace
        if token[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = start, token.start()
        elif token[0].endswith("{") and token[0] != r"\{":
            open_braces.append((token.end(), token[0] != "{"))
    return text[last[0] : last[1]] if last else None


def normalised(text: str) -> Fraction | str:
    """Return the number that ``text`` writes, exactly, or else ``text`` without LaTeX's trimmings."""
    plain = _plain(text)
    if len(plain) > _MAX_LENGTH:
        return plain
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", plain):
        plain = plain.replace(",", "")
    if re.fullmatch(_NUMBER, plain):
        return Fraction(plain)
    ratio = re.fullmatch(rf"({_NUMBER})/({_NUMBER})", plain) or re.fullmatch(
        rf"([+-]?)\\frac(?:\{{({_NUMBER})\}}|(\d))(?:\{{({_NUMBER})\}}|(\d))", plain
    )
    return _fraction(ratio, plain) if ratio else plain


def expected_texts(truths: Any) -> list[str]:
    """Return what a text, a number, or a list of these expects, without those that say nothing.

    Raises:
        DatasetError: something is neither, such as a dict: no answer could ever equal the text of it.
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
    truths = [inside for inside in insides if normalised(inside) != ""]
    if not truths:
        keys = ", ".join(sorted(task_info)) or "none"
        raise DatasetError(
            f"The task has no 'ground_truth' that says something (its keys: {keys}): add the expected answer."
        )
    return truths


def _same(answer: Fraction | str, truth: Fraction | str) -> bool:
    if _are_words(answer, truth):
        return str(answer).casefold() == str(truth).casefold()
    return answer == truth


def _is_open(answer: Fraction | str, truth: Fraction | str) -> bool:
    """Whether two that are not equal as written may still be equal as expressions."""
    if isinstance(answer, Fraction) and isinstance(truth, Fraction):
        return False
    texts = str(answer), str(truth)
    if not all(0 < len(text) <= _MAX_LENGTH for text in texts) or _are_words(*texts):
        return False
    # x and X are two symbols, math-verify takes them for one.
    return texts[0].casefold() != texts[1].casefold()


def _are_words(*sides: Fraction | str) -> bool:
    """Whether both are words, for math-verify products of letters: "no" would equal "on"."""
    return all(isinstance(side, str) and len(side) > 1 and side.isalpha() for side in sides)


def _plain(text: str) -> str:
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:()\[\] ]|\\?\$", "", text)
    text = _without_end(text)
    # A text at the end is a unit; elsewhere it is part of the answer.
    text = re.sub(r"(?<=\S)\s*\\text\s*\{[^{}]*\}$", "", text)
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s+", "", text)


def _without_end(text: str) -> str:
    """The text without a full stop, a comma or a percent sign at its end: math-verify does not know them."""
    text = re.sub(r"(?<!\\)[.,]$", "", text.strip()).rstrip()
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text


def _fraction(ratio: re.Match[str], plain: str) -> Fraction | str:
    sign = -1 if ratio[0].startswith("-\\") else 1
    numerator, denominator = (Fraction(part) for part in ratio.groups() if part not in (None, "", "+", "-"))
    return sign * numerator / denominator if denominator else plain
