"""The program that plays tests on a solution. It runs in the sandbox, see ``environments.rewards.code``.

Reads from stdin, which is a file: the size of a plan in ``SIZE_DIGITS`` digits; the plan ``{"solution":
source, "seconds": float, "tests": [{"kind", "function", "max_bytes", "start", "size"}]}``; and the inputs of
the tests as JSON, each ``size`` bytes that begin ``start`` bytes after the plan. Writes a line per test,
``{"text": str, "error": str | null}``. Each test runs in a fork of its own, so that a hang, a crash or an exit
ends that test alone. No verdict is made here: for ``stdin`` the text is what the solution printed, for
``call`` its result as JSON; what is expected of these is not known here.

For ``assert``, test code has to run, so the fork is two: the tests in one process, the solution in another,
which is asked by pipe and answers with plain values. No exit, ``__eq__`` or patch of it reaches the tests,
and it cannot look them up: they are read once it is forked, from a file that it has closed.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import linecache
import marshal
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import IO, Any

PR_SET_DUMPABLE = 4
SIZE_DIGITS = 20
SOLUTION = "solution.py"
TESTS = "tests.py"
NAMES = "__names__"
PASSED = "passed"
MAX_ERROR_BYTES = 2000

# What solutions of the public sets take for granted.
PRELUDE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


def main() -> None:
    """Play all tests; in a fork, return once its one test is over."""
    plan = json.loads(os.read(0, int(os.read(0, SIZE_DIGITS))))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no fork can look into this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    prelude: dict[str, Any] = {}
    exec(PRELUDE, prelude)
    for test in plan["tests"]:
        inputs, result, errors = (os.memfd_create(name) for name in ("inputs", "result", "errors"))
        pid = os.fork()
        if pid == 0:
            play(plan["solution"], test, (inputs, result, errors), prelude)
            return
        error = wait(pid, plan["seconds"])
        if error and error.startswith("exit"):
            said = os.pread(errors, MAX_ERROR_BYTES, max(0, os.fstat(errors).st_size - MAX_ERROR_BYTES))
            error = said.decode("utf-8", "replace").strip() or error
        text = os.pread(result, test["max_bytes"], 0).decode("utf-8", "replace")
        os.write(1, json.dumps({"text": text, "error": error}).encode() + b"\n")
        for descriptor in (inputs, result, errors):
            os.close(descriptor)


def wait(pid: int, seconds: float) -> str | None:
    """Wait until a fork ended, kill what is left of its group, and say what went wrong with it."""
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


def play(solution: str, test: dict[str, Any], files: tuple[int, int, int], prelude: dict[str, Any]) -> None:
    """Play one test in this fork; an exception of the solution or of the tests goes through."""
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
            serve(solution, prelude, os.fdopen(requests[0], "rb"), os.fdopen(replies[1], "wb"))
            return
        for descriptor in (requests[0], replies[1]):
            os.close(descriptor)
        source = read_input(test)  # not before: the solution would have it
        redirect(files, test)
        line = Line(os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb"))
        run_tests(source, test["function"], prelude, line)
        os.write(result, PASSED.encode())
        return
    given = read_input(test)
    redirect(files, test, given)
    if test["kind"] == "stdin":
        execute(solution, SOLUTION, "__main__", {})
    else:
        names = execute(solution, SOLUTION, "solution", prelude)
        value = find(names, test["function"])(*json.loads(given))
        os.write(result, json.dumps(jsonable(value)).encode())


def read_input(test: dict[str, Any]) -> str:
    """The input of a test, from where the plan came from."""
    text = json.loads(os.pread(0, test["size"], os.lseek(0, 0, os.SEEK_CUR) + test["start"]))
    assert isinstance(text, str)
    return text


def redirect(files: tuple[int, int, int], test: dict[str, Any], given: str = "") -> None:
    """Give this fork standard streams and an output limit of its own, and close what the plan came from."""
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
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    sys.excepthook = show_error


def execute(source: str, file: str, name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run ``source`` as the module ``name``, in which ``names`` are known; return all that it knows then."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update(names)
    sys.setrecursionlimit(10_000)  # what judges of programming contests allow
    exec(compile(source, file, "exec"), vars(module))
    return vars(module)


def find(names: dict[str, Any], function: str) -> Callable[..., Any]:
    """The function of that name, or the method of a ``Solution``."""
    if function in names:
        return names[function]
    if "Solution" in names and hasattr(names["Solution"], function):
        return getattr(names["Solution"](), function)
    raise NameError(f"the solution has no function {function!r}")


def jsonable(value: Any) -> Any:
    """Plain data like ``value``: tuples, sets and iterators become lists, keys become texts.

    Raises:
        TypeError: it holds something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, list | tuple | Iterator):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return jsonable(value.tolist())
    raise TypeError(f"the result is a {type(value).__name__}, which is no plain data")


def show_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Say in a few lines where in the solution or the tests it went wrong."""
    import traceback

    where = [frame for frame in traceback.extract_tb(trace) if frame.filename in (SOLUTION, TESTS)]
    if where:
        sys.stderr.write(f"{where[-1].filename}, line {where[-1].lineno}: {where[-1].line}\n")
    sys.stderr.write("".join(traceback.format_exception_only(kind, error)))


# -- the tests in one process, the solution in another -----------------------------------------------


def is_plain(value: Any) -> bool:
    """Whether ``value`` is of built-in types alone, exactly: no subclass with ideas of its own."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def serve(solution: str, prelude: dict[str, Any], requests: BufferedReader, replies: IO[bytes]) -> None:
    """Be the solution: answer requests until the tests hang up.

    A request is ``(object, attribute, arguments, keywords)``: look an attribute up, and call it where there
    are arguments. Object 0 is the module. Values travel as ``("value", plain value)`` or ``("object", its
    number)``. A reply is ``("returned", value, arguments afterwards)`` or ``("raised", type name, text)``.
    """
    objects: list[Any] = []

    def pack(value: Any) -> tuple[str, Any]:
        if is_plain(value):
            return "value", value
        objects.append(value)
        return "object", len(objects) - 1

    def unpack(item: tuple[str, Any]) -> Any:
        return objects[item[1]] if item[0] == "object" else item[1]

    def answer(number: int, attribute: str, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, ...]:
        if not objects:
            names = execute(solution, SOLUTION, "solution", prelude)
            own = [name for name, value in names.items() if value is not prelude.get(name)]
            objects.append(types.SimpleNamespace(**names, **{NAMES: [n for n in own if n[:2] != "__"]}))
        value = getattr(objects[number], attribute)
        if arguments is None:
            return "returned", pack(value), []
        given = [unpack(item) for item in arguments]
        value = value(*given, **{key: unpack(item) for key, item in keywords.items()})
        return "returned", pack(value), [item if is_plain(item) else None for item in given]

    while requests.peek(1):
        try:
            reply = answer(*marshal.load(requests))
        except Exception as error:  # noqa: BLE001 - the tests may expect it, so it is theirs to handle
            reply = "raised", type(error).__name__, str(error)
        marshal.dump(reply, replies)
        replies.flush()


@dataclass(frozen=True)
class Line:
    """The tests' end of the line to the solution."""

    requests: IO[bytes]
    replies: IO[bytes]

    def ask(
        self, number: int, attribute: str, arguments: tuple[Any, ...] | None = None, **keywords: Any
    ) -> Any:
        packed = None if arguments is None else [self._pack(item) for item in arguments]
        words = {key: self._pack(item) for key, item in keywords.items()}
        try:
            marshal.dump((number, attribute, packed, words), self.requests)
            self.requests.flush()
            kind, content, rest = marshal.load(self.replies)
        except (BrokenPipeError, EOFError) as error:
            raise RuntimeError("the solution ended the program") from error
        if kind == "raised":
            known = vars(builtins).get(content)
            if isinstance(known, type) and issubclass(known, Exception):
                raise known(rest)
            raise RuntimeError(f"{content}: {rest}")
        for given, afterwards in zip(arguments or (), rest, strict=False):
            if type(given) is list and type(afterwards) is list:
                given[:] = afterwards  # a function that sorts in place shall be seen to
        return Remote(self, content[1]) if content[0] == "object" else content[1]

    @staticmethod
    def _pack(value: Any) -> tuple[str, Any]:
        if isinstance(value, Remote):
            return "object", value.number_
        if is_plain(value):
            return "value", value
        raise TypeError(f"tests can pass plain values alone to the solution, not a {type(value).__name__}")


class Remote:
    """An object of the solution, seen from the tests. It equals no plain value, whatever it says itself."""

    def __init__(self, line: Line, number: int) -> None:
        self.line_ = line
        self.number_ = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.line_.ask(self.number_, "__eq__", (other,)) is True

    def __hash__(self) -> int:
        return hash(self.number_)

    def __getattr__(self, name: str) -> Any:
        return self.line_.ask(self.number_, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.line_.ask(self.number_, "__call__", arguments, **keywords)

    def __len__(self) -> int:
        try:
            return self.line_.ask(self.number_, "__len__", ())
        except AttributeError as error:
            raise TypeError(str(error)) from error  # what list() expects of an iterator

    def __getitem__(self, key: Any) -> Any:
        return self.line_.ask(self.number_, "__getitem__", (key,))

    def __contains__(self, item: Any) -> bool:
        return self.line_.ask(self.number_, "__contains__", (item,))

    def __iter__(self) -> Any:
        return self.line_.ask(self.number_, "__iter__", ())

    def __next__(self) -> Any:
        return self.line_.ask(self.number_, "__next__", ())

    def __str__(self) -> str:
        return self.line_.ask(self.number_, "__str__", ())


def meant_names(source: str, function: str | None, prelude: dict[str, Any]) -> set[str]:
    """The names by which tests mean the solution, also where a builtin or the prelude has the same.

    The one that the task says, and those that the tests import; else, where they use no name that is the
    solution's for certain, what they call first, as in ``assert sum(10, 15) == 25``.
    """
    nodes = list(ast.walk(ast.parse(source, TESTS)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    meant = {alias.name for node in imports for alias in node.names} | ({function} if function else set())
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if meant or used - stored - prelude.keys() - vars(builtins).keys():
        return meant
    return set([name for name in called_names(nodes[0]) if name not in stored][:1])


def called_names(node: ast.AST) -> Iterator[str]:
    """The names that ``node`` calls, in the order in which Python would: arguments before their function."""
    for child in ast.iter_child_nodes(node):
        yield from called_names(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id


def run_tests(source: str, function: str | None, prelude: dict[str, Any], line: Line) -> None:
    """Run the source of the tests, then ``check(candidate)`` and every ``test...()`` that it defines."""
    module = types.ModuleType("solution")
    meant = meant_names(source, function, prelude)
    for name in line.ask(0, NAMES):
        # With an `abs` or an `isclose` of its own, a solution would be its own judge.
        if name in meant or not (name in prelude or hasattr(builtins, name) or name[:2] == "__"):
            setattr(module, name, line.ask(0, name))
    sys.modules["solution"] = module
    known = vars(module)
    if function:
        candidate = find(known, function) if function.isidentifier() else eval(function, dict(known))
        known = known | {"candidate": candidate}
    names = execute(source, TESTS, "tests", {**prelude, **known, "__name__": "tests"})
    if function and isinstance(names.get("check"), types.FunctionType):
        names["check"](names["candidate"])
    for name, value in list(names.items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            value()


if __name__ == "__main__":
    main()
