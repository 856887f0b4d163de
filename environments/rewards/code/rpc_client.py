"""The tests\' end of the pipe to the solution, which runs in another process and is not trusted.

Part of ``driver``, and so of a program in the sandbox: the standard library is all that there is.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import nullcontext
from typing import IO, Any

from environments.rewards.code.execution import TESTS
from environments.rewards.code.own_objects import OwnObjects, become
from environments.rewards.code.program import BASE_VALUE, DEFINE, NAMES
from environments.rewards.code.remote import OPERATORS_NUMBER, Remote
from environments.rewards.code.values import packed, rebuilt

_thread = threading.local()
MOST_SHARED = 16  # containers that are looked at before each request, since tests may have changed them
ITERATION = {"next", "__next__", "anext"}


class UnplayableError(BaseException):
    """The tests do something that cannot be played between two processes, whatever the solution is."""


class RpcClient:
    """Client of the solution, see ``Program``.

    ``takes_nan``: whether the tests are about NaN. ``names_objects``: whether they use attributes that no
    built-in type has, and so may get objects; else a value of a class that derives from a built-in type comes
    as the value of that type. ``steps``: whether they take a generator's items one at a time; else it is a
    sequence to them. ``num_requests`` counts the requests of the tests.
    """

    def __init__(
        self, requests: IO[bytes], replies: IO[bytes], takes_nan: bool, names_objects: bool, steps: bool
    ) -> None:
        self.requests, self.replies = requests, replies
        self.takes_nan, self.names_objects, self.steps = takes_nan, names_objects, steps
        self.num_requests = 0
        self.own = OwnObjects(0)
        self.sources: dict[str, Callable[[], Any]] = {}  # of the tests' classes, see ``request_class``
        self._remotes: dict[int, Any] = {}
        self._lent: list[Any] = [lambda prompt="": input(prompt), lambda: sys.stdin.readline()]
        self._numbers: dict[int, int] = {}
        self._pack = functools.partial(packed, register=self._register)
        self._turn = threading.RLock()
        self._shared: dict[int, tuple[Any, Any]] = {}
        self.asserted: set[int] = set()  # lines of the tests
        self.swallowed: Exception | None = None  # a verdict of the tests that the solution has not passed on

    def load(self, definitions: list[Any]) -> list[str]:
        """Load the solution, with classes of the tests, and return the names that it defines."""
        names = self.request(0, NAMES, (definitions,))
        self.num_requests = 0
        return list(map(str, names))

    def request(
        self, number: int, attribute: str, given: tuple[Any, ...] | None = None, /, **keywords: Any
    ) -> Any:
        """Read an attribute of an object of the solution, and call it where ``given`` are arguments."""
        self.num_requests += attribute != BASE_VALUE
        with nullcontext() if hasattr(_thread, "inside") else self._turn:
            return self._answer(number, attribute, given, keywords)

    def _answer(
        self, number: int, attribute: str, given: tuple[Any, ...] | None, keywords: dict[str, Any]
    ) -> Any:
        arguments, named = self._pack(given), self._pack(keywords)
        self._send([number, attribute, arguments, named, self._changes()])
        while True:
            kind, content, afterwards, states, printed = self._receive()
            for stream, text in zip((sys.stdout, sys.stderr), printed, strict=True):
                if text:
                    stream.write(str(text))
            if kind == "lent":
                self._lend(states, *content)
                continue
            self._restore(states)
            value = content if kind == "argument" else self._value(content)
            if kind == "returned" and given is None and afterwards is not None:
                self._shared[int(afterwards)] = value, self._pack(value)
            elif afterwards is not None:
                args, named_args = map(self._value, afterwards)
                for before, after in [*zip(given or (), args, strict=True), *_pairs(keywords, named_args)]:
                    become(before, after)  # so that a function that sorts in place passes its test
            if kind == "argument":
                return [*(given or ()), *keywords.values()][value]
            if kind == "raised":
                self.swallowed = None
                raise self._error(value, attribute)
            return value

    def _changes(self) -> list[Any]:
        """Return what the tests have changed in containers that are attributes of objects of the solution."""
        changes = []
        for number, (value, before) in [*self._shared.items()][-MOST_SHARED:]:
            after = self._pack(value)
            if after != before:
                self._shared[number] = value, after
                changes.append([number, after])
        return changes

    def request_class(self, key: str, name: str, source: str, inherits: bool, free: dict[str, Any]) -> Any:
        """Define a class of the tests at the solution's end too.

        Raises:
            UnplayableError: it needs more than itself. A solution that does not take it has failed.
        """
        try:
            return self.request(0, DEFINE, (key, name, source, inherits, free))
        except Exception:
            if not inherits:
                try:
                    exec(compile(source, "tests.py", "exec"), {**free, "__name__": "tests"})
                except Exception as error:
                    raise UnplayableError(f"their class {name!r} needs more than itself ({error})") from error
            raise

    def _send(self, message: list[Any]) -> None:
        states = self.own.states(self._pack)
        try:
            self.requests.write(json.dumps([*message, states]).encode() + b"\n")
            self.requests.flush()
        except BrokenPipeError as error:
            raise RuntimeError("the solution ended the program") from error

    def _receive(self) -> list[Any]:
        line = self.replies.readline()
        if not line:
            raise RuntimeError("the solution ended the program")
        message = json.loads(line)
        if type(message) is not list or len(message) != 5:
            raise TypeError("the solution has sent no reply")
        return message

    def _restore(self, states: Any) -> None:
        self.own.restore(states, self._value)

    def _value(self, data: Any) -> Any:
        return rebuilt(data, self._find, self.takes_nan)

    def is_verdict(self, error: BaseException | None) -> bool:
        """Return whether an error is the failure of an assertion of the tests, which no solution may
        catch."""
        if isinstance(error, AssertionError):
            return True
        frames = traceback.walk_tb(error.__traceback__ if error else None)
        lines = [line for frame, line in frames if frame.f_code.co_filename == TESTS]
        return lines[-1:] != [] and lines[-1] in self.asserted

    @staticmethod
    def _error(error: Any, attribute: str) -> Exception:
        """The error that the solution raised. One that ends an iteration does so only where one is.

        Else it would end an ``all(map(...))`` of the tests before its end, which is then true.
        """
        ends = isinstance(error, StopIteration | StopAsyncIteration) and attribute not in ITERATION
        return error if isinstance(error, Exception) and not ends else RuntimeError(str(error))

    # -- what is the solution's ----------------------------------------------------------------------

    def _find(self, data: list[Any]) -> Any:
        if data[0] == "lent":
            return self._lent[data[1]]
        if data[0] != "object":
            return self.own.find(data)
        _, number, nature, base = data
        bases = self._value(base)
        if bases and not self.names_objects and number > OPERATORS_NUMBER:
            return bases[0]
        if number not in self._remotes:
            remote = Remote(self, number, self.steps and nature == "generator", bases)
            self._remotes[number] = _NATURES.get(nature, lambda each: each)(remote)
        return self._remotes[number]

    def _register(self, value: Any) -> list[Any]:
        value = getattr(value, "remote_", value) if inspect.isfunction(value) else value
        if isinstance(value, Remote):
            return ["object", value.number_]
        kind = value if isinstance(value, type) else type(value)
        key = self.own.key_of(kind)
        if key in self.sources:
            self.sources.pop(key)()
        own = self.own.register(value)
        return self._lend_out(value) if own is None else own

    # -- what the tests lend -------------------------------------------------------------------------

    def _lend_out(self, value: Any) -> list[Any]:
        nature = _nature_of_lent(value)
        if nature is None:
            kind = value.__name__ if isinstance(value, type) else type(value).__name__
            raise UnplayableError(f"they pass an object of the type {kind} to the solution")
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._lent)
            self._lent.append(value)
        return ["lent", self._numbers[id(value)], nature, str(getattr(value, "__name__", "lent"))]

    def _lend(self, states: Any, number: int, what: str, arguments: Any, keywords: Any) -> None:
        """Do with what is lent to the solution what it asks for."""
        try:
            self._restore(states)
            result = self._used(self._lent[number], what, self._value(arguments), self._value(keywords))
            message = ["returned", self._pack(result)]
        except Exception as error:  # noqa: BLE001 - the solution may expect it
            self.swallowed = error if self.is_verdict(error) else self.swallowed
            message = ["raised", self._pack(error)]
        self._send(message)

    @staticmethod
    def _used(lent: Any, what: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        nature = _nature_of_lent(lent)
        if what == "call" and nature in ("function", "async function", "object"):
            result = lent(*arguments, **keywords)
            return _outcome(result) if inspect.iscoroutine(result) else result
        if what == "await" and nature == "coroutine":
            return _outcome(lent)
        if what == "next" and nature == "iterator":
            return [item for _, item in zip(range(1), lent, strict=False)]
        if what == "next" and nature == "async iterator":
            return _outcome(_next_of(lent))
        if nature == "object" and str(arguments[:1])[2:3] != "_":
            if what == "iter":
                return iter(lent)
            if what == "get":
                return getattr(lent, *arguments)
            if not isinstance(lent, io.IOBase) and not arguments[0].startswith(("assert", "call", "mock_")):
                return setattr(lent, *arguments)
        raise AttributeError(f"the solution cannot {what} this object of the tests")


def _nature_of_lent(value: Any) -> str | None:
    """Return the way in which the solution may use what the tests lend to it, or None."""
    if type(value).__module__ == "unittest.mock" or isinstance(value, io.IOBase):
        return "object"  # before all else, since a mock has every attribute
    if inspect.iscoroutine(value):
        return "coroutine"
    if inspect.iscoroutinefunction(value):
        return "async function"
    if hasattr(type(value), "__next__"):
        return "iterator"
    if inspect.isasyncgen(value):
        return "async iterator"
    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    is_wrapper = callable(value) and type(value).__module__ in ("functools", "operator")
    return "function" if is_function or is_wrapper else None


async def _next_of(iterator: Any) -> list[Any]:
    async for item in iterator:
        return [item]
    return []


def _outcome(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine of the tests to its end, while others of theirs wait."""
    import asyncio

    outcomes: list[tuple[bool, Any]] = []

    def run() -> None:
        _thread.inside = True  # whoever has its turn waits for this
        try:
            outcomes.append((True, asyncio.run(coroutine)))
        except Exception as error:  # noqa: BLE001 - raised again below
            outcomes.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    returned, value = outcomes[0]
    if not returned:
        raise value
    return value


def _pairs(before: dict[str, Any], after: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    return [(before[name], after[name]) for name in before]


# -- objects that Python's own statements take ---------------------------------------------------------


def _coroutine(remote: Remote) -> Any:
    async def played() -> Any:
        return remote.client_.request(OPERATORS_NUMBER, "await", (remote,))

    return played()


def _async_function(remote: Remote) -> Any:
    async def played(*arguments: Any, **keywords: Any) -> Any:
        return await remote(*arguments, **keywords)

    vars(played)["remote_"] = remote
    return played


async def _async_generator(remote: Remote) -> AsyncIterator[Any]:
    while True:
        try:
            item = remote.client_.request(OPERATORS_NUMBER, "anext", (remote,))
        except StopAsyncIteration:
            return
        yield item


_NATURES: dict[str, Callable[[Remote], Any]] = {
    "coroutine": _coroutine,
    "async function": _async_function,
    "async generator": _async_generator,
}
