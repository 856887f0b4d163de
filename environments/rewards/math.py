r"""The reward for mathematics: is the last ``\boxed{...}`` the expected answer?"""

from __future__ import annotations

import logging
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple

from environments.errors import DatasetError
from environments.rewards.base import RewardOutput
from environments.sandbox.grader import Grader, GradingError

TIME_LIMIT_SECONDS = 10.0
"""For comparing two expressions; an answer that takes longer, such as 10^{10^{10}}, is wrong."""

_DECIMAL = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_NUMBER = rf"{_DECIMAL}(?:[eE][+-]?\d{{1,3}})?"
_POWER_OF_TEN = (
    rf"(?:({_DECIMAL})(?:\\times|\\cdot|\*)|([+-]?))10\^(?:\{{([+-]?\d{{1,3}})\}}|([+-]?\d{{1,3}}))"
)
_UNIT = re.compile(
    r"(?:\\(?P<command>text|mathrm) ?\{(?P<text>[^{}]*)\}|(?<=[\d} ])(?P<words>[a-zA-Z]+(?: [a-zA-Z]+)*))"
    r" ?(?:\^ ?\{?(?P<power>\d)\}?)?$"
)
_BASE = re.compile(r"[\dA-F]+_\{?(\d+)\}?")
_D = r"(?:d|\\partial|\\mathrm ?\{d\})"
_OPERATOR = re.compile(
    r"\\(?:operatorname\*? ?\{ ?)?(sum|prod|i*int|oint|lim|limsup|liminf|gcd|lcm|max|min|det|mod)(?![a-zA-Z])"
    rf"|\\frac ?\{{? ?{_D}[^{{}}]*\}}? ?\{{ ?{_D} ?[a-zA-Z]"
)
"""What asks for a calculation, also where the answer is an expression."""
_ARITHMETIC = re.compile(
    r"(?<=[\d.)!%])(?:[-+*]|\\times|\\cdot)(?=[-+]?(?:[\d.(]|\\))"
    r"|\\(?:log|ln|lg|arc|sin|cos|tan|cot|sec|csc)"
)
"""What asks for a calculation where the answer is a number: numbers that are joined, and functions."""
_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{DOT OPERATOR}": r"\cdot ",
        "\N{ASTERISK OPERATOR}": "*",
        "\N{DEGREE SIGN}": r"^\circ",
    }
)
_MAX_LENGTH = 1000  # longer ones are compared as text: turning them into integers takes too long

_grader = Grader("environments.rewards.math:equal_expressions", imports=["math_verify"])


def math_reward_fn(
    task_info: dict[str, Any], action: str, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> RewardOutput:
    r"""Reward 1 if the answer equals ``task_info["ground_truth"]``, else 0.

    The answer is the last ``\boxed{...}`` with balanced braces after the last ``</think>``; there is no
    other way to give one. The ground truth is a text, a number, or a list of these of which any will do.
    Numbers are compared exactly: 0.50, 1/2 and \frac{1}{2} are equal, and so are 1,000 and 1000, 1 1/2 and
    1.5, 2e3 and 2\times10^3. A percent sign at the end is a unit: 50\% is 50. A \text{...}, \mathrm{...} or
    word after a number is one too, with its power, and so is the base in 101_2: a missing one does not
    matter, another one does. Words are compared as text, in upper or lower case. Two
    that are not equal as numbers or texts are expressions, and math-verify decides, which rounds irrational
    numbers to six decimals. It runs in a process of its own for at most ``time_limit_seconds``.

    math-verify would also do the calculation that the task asks for. So an answer with an operator such as
    \sum, \int, \lim, \gcd or \frac{d}{dx} is wrong unless the ground truth has it too; and where that is a
    number, so is one that joins numbers by +, -, *, \times or \cdot, or has a logarithm or an angle's
    function. 1/2, 2^{10} and \sqrt{16} may stay, and so may an equation that ends with the result.

    An answer that could not be graded, or leaves a calculation, is wrong, and ``metadata["error"]`` says why.
    ``metadata["judged_by"]`` is "number", "text" or "math-verify".

    Raises:
        DatasetError: the task has no ground truth, or one of another type.
        EnvironmentFailure: math-verify cannot be run at all.
    """
    truths = _ground_truths(task_info)
    answer = last_boxed(action.rpartition("</think>")[2])
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
        given = [_without_end(_in_latex(truth)) for truth in open_truths], _without_end(_in_latex(answer))
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


class Reading(NamedTuple):
    """A parsed answer: its value, exact if it is a number, and the unit or text at its end, if any."""

    value: Fraction | str
    ending: str


def read(text: str) -> Reading:
    """Parse ``text`` without LaTeX's trimmings; the unit of a number is not part of its value."""
    plain = _plain(text)
    compact = _compact(plain)
    unit = _UNIT.search(plain) if len(plain) <= _MAX_LENGTH else None
    rest = plain[: unit.start()].strip() if unit else ""
    number = _number(_compact(rest))
    if unit is None or not rest or (number is None and unit["command"] != "text"):  # 2x+3\mathrm{i}
        base = _BASE.fullmatch(compact)
        ending = f"_{base[1]}" if base else ""
    else:
        words = (unit["text"] or unit["words"] or "").strip(" .").casefold()
        ending = words + (f"^{unit['power']}" if unit["power"] else "")
        ending = re.sub("^square (.+)", r"\1^2", re.sub("^cubic (.+)", r"\1^3", ending))
    if number is None or unit is None or unit["command"] != "text" or not _may_be_unit(ending):
        number = _number(compact)
    return Reading(compact.replace(", ", ",") if number is None else number, ending)


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
    plain, reading = _plain(answer), read(truth.rpartition("=")[2])
    if "=" in plain and _same(read(plain.rpartition("=")[2]), reading):
        return None
    allowed = set(_OPERATOR.findall(_plain(truth)))
    operator = next((found for found in _OPERATOR.finditer(plain) if (found[1] or "") not in allowed), None)
    if operator is not None or not isinstance(reading.value, Fraction):
        return operator[0] if operator else None
    compact = re.sub(r"\^\\circ|[{}]", "", re.sub(_POWER_OF_TEN, "1", _compact(plain)))
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
    if not all(0 < len(text) <= _MAX_LENGTH for text in texts) or _are_words(*texts):
        return False
    # math-verify drops the texts at the end, even where they are the answer.
    if _endings_differ(answer, truth) or not (_may_be_unit(answer.ending) and _may_be_unit(truth.ending)):
        return False
    # x and X are two symbols, math-verify takes them for one.
    return texts[0].casefold() != texts[1].casefold()


def _endings_differ(answer: Reading, truth: Reading) -> bool:
    """Whether both have a unit, and different ones: a missing unit is no difference."""
    units = [sorted(re.sub(r"(?<=\w\w)s\b| ", "", side.ending)) for side in (answer, truth)]
    return all(units) and units[0] != units[1]  # sorted, since the words may be factors: 5ab is 5ba


def _may_be_unit(ending: str) -> bool:
    words = re.sub(r"[\^_]\d+$", "", ending)
    return not re.search(r"\d|\bor\b", words)  # "7\text{ or 8}" is not 7


def _are_words(*sides: Fraction | str) -> bool:
    """Whether both are words. For math-verify they are products of letters: "no" would equal "on"."""
    return all(isinstance(side, str) and len(side) > 1 and side.isalpha() for side in sides)


def _plain(text: str) -> str:
    text = _in_latex(text).replace("{,}", ",")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[!()\[\]]|\\?\$", "", text)
    text = re.sub(r"\\[,;: ]|~", " ", text)
    return " ".join(_without_end(text).split())


def _compact(plain: str) -> str:
    """The text without meaningless spaces: 1 1/2 is not 11/2, and 100, 200 are two numbers."""
    plain = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", plain)
    plain = re.sub(r"\\frac ?(\d) ?(?=\d)", r"\\frac\1", plain)
    return re.sub(r"\s+", " ", re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", plain))


def _number(compact: str) -> Fraction | None:
    if len(compact) > _MAX_LENGTH:
        return None
    if re.fullmatch(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?", compact):
        compact = re.sub("[, ]", "", compact)
    if power := re.fullmatch(_POWER_OF_TEN, compact):
        mantissa, sign, braced, bare = power.groups()
        compact = f"{mantissa or sign + '1'}e{braced or bare}"
    if re.fullmatch(_NUMBER, compact):
        return Fraction(compact)
    compact = re.sub(
        rf"\\frac(?:\{{({_NUMBER})\}}|(\d))(?:\{{({_NUMBER})\}}|(\d))", _as_ratio, compact
    ).strip()
    ratio = re.fullmatch(rf"([+-]?)(\d+) (\d+)/(\d+)|([+-] )?({_NUMBER})/({_NUMBER})", compact)
    if ratio is None:
        return None
    *parts, numerator, denominator = (part for part in ratio.groups() if part is not None)
    if not Fraction(denominator):
        return None
    sign = -1 if parts and parts[0].strip() == "-" else 1
    whole = Fraction(parts[1]) if len(parts) == 2 else 0
    return sign * (whole + Fraction(numerator) / Fraction(denominator))


def _as_ratio(frac: re.Match[str]) -> str:
    return " " + "/".join(part for part in frac.groups() if part is not None)


def _in_latex(text: str) -> str:
    """The text with LaTeX's commands for the signs that models like to write instead: math-verify too
    knows few of them."""
    return re.sub("[¼-¾⅐-⅞]", _spelt_out, text).translate(_SIGNS)


def _spelt_out(vulgar_fraction: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", vulgar_fraction[0]).replace("\N{FRACTION SLASH}", "/")


def _without_end(text: str) -> str:
    """The text without a full stop, a comma or a percent sign at its end: math-verify does not know them."""
    text = re.sub(r"(?<!\\)[.,]$", "", text.strip()).rstrip()
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text
