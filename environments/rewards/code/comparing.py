"""Compares what a program printed or returned with what is expected, or has the task's own checker do so.

A checker, for problems that have several right answers, is Python source that defines
``check(input, output, expected) -> bool``. For programs that read and print, all three are texts; for calls,
the list of arguments, the result and the expected value. It runs in the sandbox too, but in another run than
the program: so ``output`` is all that it has of that. A checker that raises an error has not accepted the
output. It must not run what a program has printed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from environments.errors import DatasetError
from environments.rewards.code.large_json import read_json, write_json
from environments.sandbox.base import Sandbox, SandboxLimits, clip

Case = tuple[Any, Any, Any]
"""The input, the output and what is expected."""

_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_CHECKER_RUN = """
import json, os, sys, traceback
sys.set_int_max_str_digits(0)
verdicts = os.dup(1)
os.dup2(2, 1)  # what a checker prints is no verdict
given = json.load(sys.stdin)
names = {"__name__": "checker"}
try:
    exec(compile(given["checker"], "checker.py", "exec"), names)
except Exception:
    os.write(verdicts, json.dumps({"error": traceback.format_exc(limit=-1)}).encode())
    sys.exit()
found = []
for case in given["cases"]:
    try:
        found.append(bool(names["check"](*case)))
    except (Exception, SystemExit) as error:
        found.append(f"the checker raised {type(error).__name__}: {error}")
text = json.dumps({"verdicts": found}).encode()
while text:
    text = text[os.write(verdicts, text):]
"""


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


def check(sandbox: Sandbox, checker: str, cases: Sequence[Case], limits: SandboxLimits) -> list[str | None]:
    """The verdict on each case: None where the checker accepts it, else why not.

    Raises:
        DatasetError: the checker cannot be run.
    """
    result = sandbox.run(_CHECKER_RUN, write_json({"checker": checker, "cases": cases}), limits)
    try:
        reply = json.loads(result.stdout)
    except ValueError:
        return [f"the checker came to no verdict ({result.ending.value})"] * len(cases)
    if "error" in reply:
        raise DatasetError(f"The checker {clip(checker, 100)!r} cannot be run: {reply['error']}")
    refused = {True: None, False: "the checker does not accept it"}
    return [refused[verdict] if isinstance(verdict, bool) else verdict for verdict in reply["verdicts"]]


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
