"""The reward for programs: does the code in the answer pass all tests?"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from environments.errors import DatasetError
from environments.rewards.base import RewardOutput
from environments.rewards.code.comparing import Case, check, same_output, same_result, same_value
from environments.rewards.code.forms import parsed_tests
from environments.rewards.code.large_json import read_json, write_json
from environments.rewards.code.reading import CodeTest, read_tests
from environments.sandbox.base import SandboxLimits, SandboxResult, SandboxSource, clip, make_sandbox
from environments.thoughts import split_thought

__all__ = ["CodeTest", "Failure", "code_reward_fn", "read_tests", "run_tests", "same_output", "same_value"]

TEST_SECONDS = 6.0
"""Time limit of one test."""
TOTAL_SECONDS = 120.0
"""Time limit of all tests of an answer together; tests that are not reached count as failed."""
MAX_SHOWN = 500
"""Characters of an input or an output that a verdict shows."""
MAX_FAILURES = 10
PASSED, UNPLAYABLE = "passed", "unplayable: "
"""Texts that ``driver`` writes in the place of the result of assertions."""

_PROGRAM = (
    *("values", "own_objects", "program", "execution", "rpc_client"),
    *("usage", "script", "collection", "assertions", "driver"),
)
"""The modules of this folder that run in the sandbox, in the order in which they import one another."""
_LIMITS = SandboxLimits(file_bytes=256 << 20, output_bytes=256 << 20)
_SPARE_BYTES = 64 << 10  # an output that is longer than twice the expected one by this is surely wrong


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

    The tests are ``task_info["tests"]`` or else ``["ground_truth"]`` or ``["input_output"]``: data, or JSON
    text of it, in one of the shapes that public sets have (LiveCodeBench, TACO and APPS, CodeContests,
    HumanEval, MBPP, KodCode, LeetCode), in which two lists of equal length hold a test in each place; or
    LiveCodeBench's columns ``public_test_cases`` and ``private_test_cases``. ``"entry_point"``, ``"fn_name"``
    or ``"metadata": {"func_name": ...}`` of the task name the function; cases beside it are calls.

    Assertions are run as a script, then as pytest collects them. They see what they import ``from solution``,
    call or use as a class, but no name that Python or a library has too (a builtin, or one that solutions
    find imported, as ``isclose``): such a one has to be named by the task, or imported ``from solution``.
    They see plain values: a result of a class of the solution's own judges nothing. Their own objects and
    functions may be passed to it. Forms that cannot be played between two processes are a ``DatasetError``.

    Output is compared line by line without trailing blanks, and numbers with a tolerance of 1e-6 where one is
    no integer; it is relative too where none is expected. Where several outputs are right, the task's
    ``"checker"`` says which: source that defines ``check(input, output, expected)``, see ``checker``.

    The tests run in ``sandbox``. To choose another one than that of this machine, pass
    ``functools.partial(code_reward_fn, sandbox=...)`` as the reward function.

    Metadata: ``num_tests``, ``num_passed``, and ``failures``, the first ``MAX_FAILURES`` tests that failed,
    public ones first: ``input``, ``expected``, ``got``, ``error``, ``public`` (False if the test says
    ``"private": true``). Without code in the answer there is an ``error`` instead.

    Raises:
        DatasetError: the task has no tests, of an unknown shape, or of a form that cannot be played.
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


def last_code_block(text: str) -> str | None:
    """Return the inside of the last closed block that three backticks fence and call Python.

    Where there is none, it is the last one of no language: after a program it often shows its output. A
    block in a list is indented as its fence is, so that much is taken from each line.
    """
    last: dict[bool, str] = {}  # by whether a language is named
    indentation = 0
    language: str | None = None  # of the block that is open
    body: list[str] = []
    for line in text.split("\n"):
        fence = re.match(r"(\s*)```\s*(\w*)", line)
        if not fence:
            body.append(line[min(indentation, len(line) - len(line.lstrip())) :])
        elif language is not None and line.strip() == "```":
            if language in ("", "python", "python3", "py"):
                last[language != ""] = "\n".join([*body, ""])
            language = None
        else:
            indentation, language, body = len(fence[1]), fence[2].lower(), []
    return last.get(True, last.get(False))


def run_tests(
    code: str,
    tests: Sequence[CodeTest],
    test_seconds: float = TEST_SECONDS,
    total_seconds: float = TOTAL_SECONDS,
    sandbox: SandboxSource = "local",
) -> list[Failure | None]:
    """Run ``code`` on each test in one run of ``sandbox``; return each test's failure, None where it passed.

    The verdict is made here, from plain data: the expected output never enters the sandbox, and the process
    that runs the code never holds the assertions, which another process of the sandbox makes. A checker runs
    in a sandbox after that.
    """
    # The limit of CPU time is for all tests together too: what holds for one of them is the driver's.
    limits = replace(_LIMITS, timeout_seconds=total_seconds, cpu_seconds=math.ceil(total_seconds))
    box = make_sandbox(sandbox)
    result = box.run(_program(), _plan(code, tests, test_seconds), limits)
    replies = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    if len(replies) < len(tests):
        missing = {"text": "", "error": _missing(result, total_seconds)}
        replies += [missing] * (len(tests) - len(replies))
    failures = [_judge(test, **reply) for test, reply in zip(tests, replies, strict=True)]
    has_checker = [place for place, test in enumerate(tests) if test.checker is not None]
    places = [place for place in has_checker if failures[place] is None]
    if places:  # the task's checker judges what has not failed before
        cases = [_case(tests[place], replies[place]["text"]) for place in places]
        verdicts = check(box, str(tests[places[0]].checker), cases, limits)
        for place, verdict in zip(places, verdicts, strict=True):
            if verdict is not None:
                failure = _failure(tests[place], replies[place]["text"], None)
                failures[place] = replace(failure, error=verdict)
    return failures


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
    entries = [_entry_of(test, start, size) for test, start, size in places]
    modules = sorted({module for test in tests for module in _imported(test)})
    plan = json.dumps({"solution": code, "seconds": seconds, "modules": modules, "tests": entries})
    return f"{len(plan):020}{plan}{''.join(inputs)}"


def _imported(test: CodeTest) -> set[str]:
    """The modules that the source of a test imports."""
    if test.kind != "assert":
        return set()
    nodes = list(ast.walk(parsed_tests(test.input)))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return imported - {"solution"}


def _entry_of(test: CodeTest, start: int, size: int) -> dict[str, Any]:
    """A test as the driver knows it: without the expected output, and without its exact length."""
    most = 2 * len(_text(test.expected).encode("utf-8", "replace")) + _SPARE_BYTES
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
    """The failure of a test whose output is ``text``, without the verdict of its checker."""
    if error is None:
        if test.kind == "assert":
            if text.startswith(UNPLAYABLE):
                reason = text.removeprefix(UNPLAYABLE)
                raise DatasetError(f"The tests {clip(test.input, 100)!r} cannot be played: {reason}.")
            error = None if text == PASSED else "the tests did not run to their end"
            passed = error is None
        elif test.checker is not None:
            passed = test.kind == "stdin" or _is_json(text)
        elif test.kind == "stdin":
            passed = same_output(text, test.expected)
        else:
            passed = same_result(text, test.expected)
        if passed:
            return None
    return _failure(test, text, error)


def _failure(test: CodeTest, text: str, error: str | None) -> Failure:
    shows = test.kind != "assert"
    return Failure(
        input=clip(test.input, MAX_SHOWN),
        expected=clip(_text(test.expected), MAX_SHOWN) if shows else None,
        got=clip(text, MAX_SHOWN) if shows and error is None else None,
        error=None if error is None else clip(error, MAX_SHOWN),
        public=test.public,
    )


def _text(expected: Any) -> str:
    return expected if isinstance(expected, str) else write_json(expected)


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except (ValueError, RecursionError):  # the solution can write the text, so it may be anything
        return False
    return True


def _case(test: CodeTest, text: str) -> Case:
    if test.kind == "stdin":
        return test.input, text, test.expected
    return read_json(test.input), read_json(text), test.expected
