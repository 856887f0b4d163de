"""Runs a task's own checker, for problems that have several right answers.

A checker is Python source that defines ``check(input, output, expected) -> bool``. For programs that read and
print, all three are texts; for calls, the list of arguments, the result and the expected value. It runs in
the sandbox too, but in another run than the program: so ``output`` is all that it has of that. A checker that
raises an error has not accepted the output. It must not run what a program has printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from environments.errors import DatasetError
from environments.rewards.code.large_json import write_json
from environments.sandbox.base import Sandbox, SandboxLimits, clip

_PROGRAM = """
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


Case = tuple[Any, Any, Any]
"""The input, the output and what is expected."""


def check(sandbox: Sandbox, checker: str, cases: Sequence[Case], limits: SandboxLimits) -> list[str | None]:
    """The verdict on each case: None where the checker accepts it, else why not.

    Raises:
        DatasetError: the checker cannot be run.
    """
    result = sandbox.run(_PROGRAM, write_json({"checker": checker, "cases": cases}), limits)
    try:
        reply = json.loads(result.stdout)
    except ValueError:
        return [f"the checker came to no verdict ({result.ending.value})"] * len(cases)
    if "error" in reply:
        raise DatasetError(f"The checker {clip(checker, 100)!r} cannot be run: {reply['error']}")
    refused = {True: None, False: "the checker does not accept it"}
    return [refused[verdict] if isinstance(verdict, bool) else verdict for verdict in reply["verdicts"]]
