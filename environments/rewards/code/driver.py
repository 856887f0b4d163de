"""The program that plays tests on a solution. It runs in the sandbox, see ``reward``.

Reads from stdin, which is a file: the size of a plan in ``SIZE_DIGITS`` digits; the plan ``{"solution":
source, "seconds": float, "modules": [those that tests import], "tests": [{"kind", "function", "max_bytes",
"start", "size"}]}``; and the inputs of the tests as JSON, each ``size`` bytes that begin ``start`` bytes
after the plan. Writes a line per test, ``{"text": str, "error": str | null}``. Each test runs in a fork of
its own, so that a hang, a crash or an exit ends that test alone. No verdict is made here: for ``stdin`` the
text is the output of the solution, for ``call`` its result as JSON; the expected ones are not known here.

For ``assert``, test code has to run, so the fork is two: the tests in one process, the solution in another,
which is asked by pipe and answers with plain values. No exit, ``__eq__`` or patch of it reaches the tests,
and it cannot look them up: they are read once it is forked, from a file that it has closed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import io
import json
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from environments.rewards.code.assertions import keep_apart, run_tests
from environments.rewards.code.execution import PRELUDE, SOLUTION, TESTS, execute, find, own_names
from environments.rewards.code.program import Program
from environments.rewards.code.rpc_client import UnplayableError
from environments.rewards.code.values import base_values

PR_SET_DUMPABLE = 4
SIZE_DIGITS = 20
PASSED = "passed"
UNPLAYABLE = "unplayable: "
MAX_ERROR_BYTES = 2000
KEPT_ERROR_BYTES = 32 << 10
Files = tuple[int, int, int]
"""The descriptors of a test's input, result and errors."""


class TailFile(io.FileIO):
    """A file that keeps the end of what is written: the limit of an output is not for a program's errors."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > KEPT_ERROR_BYTES:
            self.seek(0)
            self.truncate()
        super().write(data[-KEPT_ERROR_BYTES:])
        return len(data)


def main() -> None:
    """Play all tests; in a fork, return once its one test is over."""
    plan = json.loads(os.read(0, int(os.read(0, SIZE_DIGITS))))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no fork can look into this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.set_int_max_str_digits(0)  # an answer may have any number of digits
    prelude: dict[str, Any] = {}
    exec(PRELUDE, prelude)
    absent = set()
    for module in plan["modules"]:  # before a solution runs, which may be able to change them
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as missing:  # the test that imports it will say it
            absent.add(str(missing.name))
        except Exception:  # noqa: BLE001 - so it will
            pass
    for test in plan["tests"]:
        inputs, result, errors = (os.memfd_create(name) for name in ("inputs", "result", "errors"))
        pid = os.fork()
        if pid == 0:
            play(plan["solution"], test, (inputs, result, errors), prelude, absent)
            return
        error = wait(pid, plan["seconds"])
        if error and error.startswith("exit"):
            stderr = os.pread(errors, MAX_ERROR_BYTES, max(0, os.fstat(errors).st_size - MAX_ERROR_BYTES))
            error = stderr.decode("utf-8", "replace").strip() or error
        text = os.pread(result, test["max_bytes"], 0).decode("utf-8", "replace")
        os.write(1, json.dumps({"text": text, "error": error}).encode() + b"\n")
        for descriptor in (inputs, result, errors):
            os.close(descriptor)


def wait(pid: int, seconds: float) -> str | None:
    """Wait until a fork ended, kill the rest of its group, and describe its error, if any."""
    deadline = time.monotonic() + seconds
    with suppress(PermissionError, ProcessLookupError):  # it was faster to do it itself
        os.setpgid(pid, pid)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        signal.sigtimedwait({signal.SIGCHLD}, left)
    timed_out = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    with suppress(ProcessLookupError):  # it went over to another group
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if timed_out:
        return f"time limit of {seconds:g} s exceeded"
    if code < 0:
        return f"crashed: {signal.strsignal(-code)}"
    return f"exit code {code}" if code else None


def play(
    solution: str, test: dict[str, Any], files: Files, prelude: dict[str, Any], absent: set[str]
) -> None:
    """Play one test in this fork; an exception of the solution or of the tests goes through.

    ``absent``: modules that tests import, and that are not installed here.
    """
    with suppress(PermissionError):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    result = files[1]
    if test["kind"] == "assert":
        requests, replies = os.pipe(), os.pipe()
        if os.fork() == 0:
            redirect(files, test)
            for descriptor in (requests[1], replies[0], result):
                os.close(descriptor)
            load = functools.partial(own_names, solution, prelude)
            Program(load, os.fdopen(requests[0], "rb"), os.fdopen(replies[1], "wb")).serve()
            return
        for descriptor in (requests[0], replies[1]):
            os.close(descriptor)
        source = read_input(test)  # not before: the solution would have it
        redirect(files, test)
        keep_apart()
        pipes = os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb")
        try:
            run_tests(source, test["function"], prelude, pipes, absent)
            os.write(result, PASSED.encode())
        except UnplayableError as error:
            os.write(result, f"{UNPLAYABLE}{error}".encode())
        return
    given = read_input(test)
    redirect(files, test, given)
    if test["kind"] == "stdin":
        execute(solution, SOLUTION, "__main__", {})
    else:
        names = own_names(solution, prelude, {})
        function, arguments = find(names, test["function"]), json.loads(given)
        value = function(**arguments) if isinstance(arguments, dict) else function(*arguments)
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        os.write(result, json.dumps(jsonable(value)).encode())


def read_input(test: dict[str, Any]) -> str:
    """The input of a test, from where the plan came from."""
    text = json.loads(os.pread(0, test["size"], os.lseek(0, 0, os.SEEK_CUR) + test["start"]))
    assert isinstance(text, str)
    return text


def redirect(files: Files, test: dict[str, Any], given: str = "") -> None:
    """Give this fork standard streams and an output limit of its own, and close the file of the plan."""
    inputs, result, errors = files
    if test["kind"] == "stdin":
        os.write(inputs, given.encode("utf-8", "replace"))
        os.lseek(inputs, 0, os.SEEK_SET)
    resource.setrlimit(resource.RLIMIT_FSIZE, (test["max_bytes"], test["max_bytes"]))
    prints = result if test["kind"] == "stdin" else os.open(os.devnull, os.O_WRONLY)
    for descriptor, standard in ((inputs, 0), (prints, 1), (errors, 2)):
        os.dup2(descriptor, standard)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    tail = io.BufferedWriter(TailFile(2, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(tail, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.excepthook = show_error


def jsonable(value: Any) -> Any:
    """Plain data like ``value``: iterables become lists, keys become texts.

    Raises:
        TypeError: it holds an object of another type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return base_values(value)[0]
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=repr)
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return jsonable(value.tolist())
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return [jsonable(item) for item in value]
    raise TypeError(f"the result is a {type(value).__name__}, which is no plain data")


def show_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Show in a few lines where in the solution or the tests it went wrong."""
    import traceback

    where = [frame for frame in traceback.extract_tb(trace) if frame.filename in (SOLUTION, TESTS)]
    if where:
        sys.stderr.write(f"{where[-1].filename}, line {where[-1].lineno}: {where[-1].line}\n")
    sys.stderr.write("".join(traceback.format_exception_only(kind, error)))


if __name__ == "__main__":
    main()
