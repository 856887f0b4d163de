"""The reward for programs: does the code in the answer pass all tests?"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from environments.errors import DatasetError
from environments.rewards.base import RewardOutput
from environments.rewards.code.answer import last_code_block
from environments.rewards.code.assertions import calls_check
from environments.sandbox.base import SandboxLimits, SandboxResult, SandboxSource, clip, make_sandbox
from environments.thoughts import split_thought

TEST_SECONDS = 6.0
"""Time limit of one test."""
TOTAL_SECONDS = 120.0
"""Time limit of all tests of an answer together; tests that are not reached count as failed."""
MAX_SHOWN = 500
"""Characters of an input or an output that a verdict shows."""
MAX_FAILURES = 10

_PROGRAM = ("values", "remote", "execution", "assertions", "driver")
"""The modules of this folder that run in the sandbox, in the order in which they import one another."""
_LIMITS = SandboxLimits(file_bytes=256 << 20, output_bytes=256 << 20)
_SPARE_BYTES = 64 << 10  # an output that is longer than twice the expected one by this is surely wrong
_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_SHAPES = (
    '[{"input": ..., "output": ...}], {"input": [...], "output": [...]}, '
    '{"inputs": [...], "outputs": [...]} (with "fn_name" for calls), '
    '{"functional": "assert ..."}, a text of assertions or a list of such'
)


@dataclass(frozen=True)
class CodeTest:
    """One test.

    ``stdin``: the program prints ``expected`` when it reads ``input``. ``call``: ``function``, called with
    the JSON list ``input``, returns ``expected``. ``assert``: the source ``input`` runs through; ``function``
    is known to it as ``candidate``. A test that is not ``public`` is not shown to the model.
    """

    kind: Literal["stdin", "call", "assert"]
    input: str
    expected: Any = None
    function: str | None = None
    public: bool = True


@dataclass(frozen=True)
class Failure:
    """A test that an answer did not pass. All texts are cut to ``MAX_SHOWN`` characters."""

    input: str
    expected: str | None
    got: str | None
    error: str | None
    public: bool


def code_reward_fn(task_info: dict[str, Any], action: str, sandbox: SandboxSource = "local") -> RewardOutput:
    """Reward 1 if the last fenced code block outside of the thoughts passes all tests, else 0.

    A block without a language counts only where none is called Python: see ``last_code_block``.

    The tests are ``task_info["tests"]`` or else ``["ground_truth"]``: data, or JSON text of it, in one of the
    shapes that public sets have (LiveCodeBench, TACO and APPS, CodeContests, HumanEval, MBPP, KodCode,
    LeetCode), in which two lists of equal length hold a test in each place. ``"entry_point"``, ``"fn_name"``
    or ``"metadata": {"func_name": ...}`` of the task name the function. Assertions see all that the solution
    defines, but no name that Python has too (a builtin, or one that solutions find imported, as
    ``isclose``): such a one has to be named by the task, or imported ``from solution``. Output is compared
    line by line without trailing blanks, and numbers with a tolerance of 1e-6 where one is no integer; it is
    relative too where none is expected.

    The tests run in ``sandbox``. To choose another one than that of this machine, pass
    ``functools.partial(code_reward_fn, sandbox=...)`` as the reward function.

    Metadata: ``num_tests``, ``num_passed``, and ``failures``, the first ``MAX_FAILURES`` tests that failed,
    public ones first: ``input``, ``expected``, ``got``, ``error``, ``public`` (False if the test says
    ``"private": true``). Without code in the answer there is an ``error`` instead.

    Raises:
        DatasetError: the task has no tests, or of an unknown shape.
        EnvironmentFailure: the sandbox failed.
    """
    tests = read_tests(task_info)
    code = last_code_block(split_thought(action)[1])
    if code is None:
        error = "The answer holds no complete fenced code block (```python ... ```)."
        return RewardOutput(0.0, {"num_tests": len(tests), "num_passed": 0, "error": error}, is_correct=False)
    failures = [failure for failure in run_tests(code, tests, sandbox=sandbox) if failure is not None]
    failures.sort(key=lambda failure: not failure.public)
    metadata = {
        "num_tests": len(tests),
        "num_passed": len(tests) - len(failures),
        "failures": [vars(failure) for failure in failures[:MAX_FAILURES]],
    }
    return RewardOutput(float(not failures), metadata, is_correct=not failures)


def run_tests(
    code: str,
    tests: Sequence[CodeTest],
    test_seconds: float = TEST_SECONDS,
    total_seconds: float = TOTAL_SECONDS,
    sandbox: SandboxSource = "local",
) -> list[Failure | None]:
    """Run ``code`` on each test in one run of ``sandbox``; return each test's failure, None where it passed.

    The verdict is made here, from plain data: the expected output never enters the sandbox, and the process
    that runs the code never holds the assertions, which another process of the sandbox makes.
    """
    # The limit of CPU time is for all tests together too: what holds for one of them is the driver's.
    limits = replace(_LIMITS, timeout_seconds=total_seconds, cpu_seconds=math.ceil(total_seconds))
    result = make_sandbox(sandbox).run(_program(), _plan(code, tests, test_seconds), limits)
    replies = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    if len(replies) < len(tests):
        missing = {"text": "", "error": _missing(result, total_seconds)}
        replies += [missing] * (len(tests) - len(replies))
    return [_judge(test, **reply) for test, reply in zip(tests, replies, strict=True)]


@functools.cache
def _program() -> str:
    """The driver and the modules that it imports, since the sandbox has no file of this project."""
    parts = ["import sys, types\n"]
    for name in _PROGRAM:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        module = f"{__package__}.{name}"
        parts.append(f"sys.modules[{module!r}] = types.ModuleType({module!r})\n")
        names = "globals()" if name == _PROGRAM[-1] else f"vars(sys.modules[{module!r}])"
        parts.append(f"exec(compile({source!r}, {f'{name}.py'!r}, 'exec'), {names})\n")
    return "".join(parts)


def _plan(code: str, tests: Sequence[CodeTest], seconds: float) -> str:
    """The driver's input, see there. The inputs of tests stand apart, so that it can read one at a time."""
    inputs = [json.dumps(test.input) for test in tests]  # ASCII, so that a character is a byte
    starts = accumulate(map(len, inputs), initial=0)
    places = zip(tests, starts, map(len, inputs), strict=False)  # one start more: the end of all
    described = [_described(test, start, size) for test, start, size in places]
    modules = sorted({module for test in tests for module in _imported(test)})
    plan = json.dumps({"solution": code, "seconds": seconds, "modules": modules, "tests": described})
    return f"{len(plan):020}{plan}{''.join(inputs)}"


def _imported(test: CodeTest) -> set[str]:
    """The modules that the source of a test imports."""
    if test.kind != "assert":
        return set()
    nodes = list(ast.walk(_tree(test.input)))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return imported - {"solution"}


def _tree(source: str) -> ast.Module:
    """The syntax tree of tests.

    Raises:
        DatasetError: they are no Python.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DatasetError(
            f"The tests {clip(source, 100)!r} are no Python: {error}. Correct them."
        ) from error


def _described(test: CodeTest, start: int, size: int) -> dict[str, Any]:
    """A test as the driver knows it: without the expected output, and without its exact length."""
    most = 2 * len(str(test.expected).encode("utf-8", "replace")) + _SPARE_BYTES
    return {
        "kind": test.kind,
        "function": test.function,
        "max_bytes": 1 << most.bit_length(),  # the exact length would tell a yes from a no
        "start": start,
        "size": size,
    }


def _missing(result: SandboxResult, total_seconds: float) -> str:
    if result.timed_out:
        return f"not run: all tests together took more than {total_seconds:g} s"
    return f"not run: the tests were ended ({result.ending.value})"


def _judge(test: CodeTest, text: str, error: str | None) -> Failure | None:
    if error is None:
        if test.kind == "assert":
            error = None if text == "passed" else "the tests did not run to their end"
            passed = error is None
        elif test.kind == "stdin":
            passed = same_output(text, test.expected)
        else:
            passed = _same_result(text, test.expected)
        if passed:
            return None
    expected = test.expected if isinstance(test.expected, str) else json.dumps(test.expected)
    shows = test.kind != "assert"
    return Failure(
        input=clip(test.input, MAX_SHOWN),
        expected=clip(expected, MAX_SHOWN) if shows else None,
        got=clip(text, MAX_SHOWN) if shows and error is None else None,
        error=None if error is None else clip(error, MAX_SHOWN),
        public=test.public,
    )


# -- comparing -------------------------------------------------------------------------------------------


def same_output(got: str, expected: str) -> bool:
    """Compare line by line, without trailing blanks and empty lines; numbers with a tolerance."""
    return _same_lines(_lines(got), _lines(expected))


def same_value(got: Any, expected: Any) -> bool:
    """Compare plain JSON values, floats with a tolerance."""
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[key], expected[key]) for key in expected)
    if isinstance(got, float) or isinstance(expected, float):
        numbers = isinstance(got, int | float) and isinstance(expected, int | float)
        near = _near if isinstance(expected, int) else _close
        return numbers and (got == expected or near(got, expected))
    return bool(got == expected)


def _same_result(text: str, expected: Any) -> bool:
    try:
        got = json.loads(text)
        # TACO and APPS write a result as a list of one.
        wrapped = isinstance(expected, list) and len(expected) == 1
        return same_value(got, expected) or (wrapped and same_value(got, expected[0]))
    except (ValueError, RecursionError):  # the solution can write the text, so it may be anything
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_lines(got: list[str], expected: list[str]) -> bool:
    return len(got) == len(expected) and all(map(_same_line, got, expected))


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
    """Whether a number with a point or an exponent equals the expected integer, however large."""
    number = Decimal(got)
    return number.is_finite() and abs(number - Decimal(expected)) <= _TOLERANCE


def _close(got: float, expected: float) -> bool:
    try:
        finite = math.isfinite(got) and math.isfinite(expected)
        return finite and math.isclose(got, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


# -- reading tests ---------------------------------------------------------------------------------------


def read_tests(task_info: dict[str, Any]) -> list[CodeTest]:
    """Return the tests of a task.

    Raises:
        DatasetError: there are none, or they have an unknown shape.
    """
    given = task_info.get("tests") or task_info.get("ground_truth")
    tests = _tests_in(_parsed(given), _function_of(task_info))
    if not tests:
        keys = ", ".join(sorted(task_info)) or "none"
        raise DatasetError(
            f"The task has no tests in 'tests' or 'ground_truth' (its keys: {keys}): add some as {_SHAPES}."
        )
    return tests


def _parsed(given: Any) -> Any:
    """The data that a JSON text holds; anything else as it is."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(given)
        except ValueError:
            return given
    return given


def _tests_in(given: Any, function: str | None) -> list[CodeTest]:
    if not given:
        return []
    if isinstance(given, str):
        tree = _tree(given)
        if "def check(" in given and function is None and not calls_check(tree):
            raise DatasetError(
                "The tests define check(candidate) and do not call it: name the function in 'entry_point', "
                "or end them with a call such as check(Solution().f)."
            )
        return [CodeTest("assert", given, function=function)]
    if isinstance(given, list | tuple):
        return [test for item in given for test in _tests_in(item, function)]
    if isinstance(given, dict):
        function = _function_of(given) or function
        if "inputs" in given and "outputs" in given:
            inputs, outputs = given["inputs"], given["outputs"]
            if len(inputs) != len(outputs):
                raise DatasetError(f"The tests have {len(inputs)} inputs but {len(outputs)} outputs.")
            return [_pair(bool(function), *pair, function) for pair in zip(inputs, outputs, strict=True)]
        if "input" in given and "output" in given:
            called = given.get("testtype") == "functional"
            if called and function is None:
                raise DatasetError("A functional test names no function: add 'metadata': {'func_name': ...}.")
            public = not given.get("private", False)
            pairs = [(given["input"], given["output"])]
            if not called and _are_columns(*pairs[0]):
                pairs = list(zip(*pairs[0], strict=True))
            return [replace(_pair(called, *pair, function), public=public) for pair in pairs]
        if "functional" in given:
            return _tests_in(given["functional"], function)
    shown = sorted(given) if isinstance(given, dict) else clip(repr(given), 100)
    raise DatasetError(f"The tests have an unknown shape ({shown}): write them as {_SHAPES}.")


def _are_columns(inputs: Any, outputs: Any) -> bool:
    """Whether these are several tests, as CodeContests has them, and not one test as a list of lines."""
    return isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)


def _function_of(info: dict[str, Any]) -> str | None:
    metadata = _parsed(info.get("metadata"))
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    return info.get("entry_point") or info.get("fn_name") or named


def _pair(called: bool, question: Any, answer: Any, function: str | None) -> CodeTest:
    if not called:
        return CodeTest("stdin", _joined(question), _joined(answer))
    if isinstance(question, str):  # LiveCodeBench: a JSON value per line, one for each argument
        question, answer = [_json(line) for line in question.splitlines() if line.strip()], _json(answer)
    return CodeTest("call", json.dumps(question), answer, function)


def _joined(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _json(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DatasetError(
            f"A functional test holds {clip(text, 100)!r}, which is no JSON: {error}."
        ) from error
