"""The solution's end of the pipe: answers the requests of ``rpc_client``. Part of ``driver``."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
import inspect
import io
import json
import operator
import pickle
import random
import sys
import threading
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from io import BufferedReader
from typing import IO, Any

from environments.rewards.code.own_objects import OwnObjects, become
from environments.rewards.code.values import PLAIN, base_values, packed, rebuilt

INPUT, LINE_OF_INPUT = 0, 1  # what the tests lend to every solution
MAX_PRINTED = 16 << 20


class Program:
    """The solution, whose names ``load`` returns: answers requests until the tests hang up.

    A request is ``[object, attribute, arguments, keywords, changes, states]``: look an attribute up, and call
    it where there are arguments. Object 0 has the names as attributes, once object 1, which has the
    ``OPERATORS``, has loaded them. ``changes`` are those of the tests in containers that they have a copy of.
    A reply is ``["returned", value, afterwards, states, printed]``, where ``afterwards`` has the arguments if
    they have changed, or the number of an attribute that is a container; or ``["argument", place, ...]``
    where the value is one of the arguments; or ``["raised", error, ...]``. Before it may come ``["lent",
    [number, what, arguments, keywords], ...]``, a request for something that the tests have lent, with a
    reply of its own. ``states`` are those of the tests' own objects. All are lines of JSON, of ``packed``
    values.
    """

    def __init__(
        self, load: Callable[[dict[str, Any]], dict[str, Any]], requests: BufferedReader, replies: IO[bytes]
    ) -> None:
        self.load, self.requests, self.replies = load, requests, replies
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # of objects by their id, which stays theirs since they are kept
        self.own = OwnObjects(1)
        self.shared: list[Any] = []  # containers that the tests have a copy of, and may change
        self.borrowed: dict[int, Any] = {}
        self.turn = threading.RLock()
        self.printed = [Printed(), Printed()]
        self.runner: Any = None
        self.pack = functools.partial(packed, register=self._register)
        self.rebuild = functools.partial(rebuilt, find=self._find)
        self.names = types.SimpleNamespace()
        operators = types.SimpleNamespace(**OPERATORS, load=self._load, define=self._define, wait=self._wait)
        operators.anext = lambda iterator: self._wait(anext(iterator))
        for value in (self.names, operators):
            self._register(value)

    def serve(self) -> None:
        sys.stdout, sys.stderr = self.printed
        sys.stdin = LentInput(functools.partial(self._use_lent, LINE_OF_INPUT, "call"))
        builtins.input = lambda prompt="": self._use_lent(INPUT, "call", str(prompt))
        for request in self.requests:
            self._send(*self._reply(json.loads(request)))

    def _reply(self, request: list[Any]) -> tuple[str, Any, Any]:
        number, attribute, packed_arguments, packed_keywords, changes, states = request
        afterwards: Any = None
        try:
            self.own.restore(states, self.rebuild)
            for place, change in changes:
                become(self.shared[place], self.rebuild(change))
            value = getattr(self.objects[number], attribute)
            if packed_arguments is None:
                if type(value) in (list, dict, set):
                    self.shared.append(value)
                    return "returned", self.pack(value), len(self.shared) - 1
                return "returned", self.pack(value), None
            given, keywords = self.rebuild(packed_arguments), self.rebuild(packed_keywords)
            value = value(*given, **keywords)
            after = [self.pack(given), self.pack(keywords)]
            afterwards = None if after == [packed_arguments, packed_keywords] else after
            places = [place for place, each in enumerate([*given, *keywords.values()]) if each is value]
            if places and type(value) not in PLAIN:
                return "argument", places[0], afterwards
            return "returned", self.pack(value), afterwards
        except Exception as error:  # noqa: BLE001 - the tests may expect it, so it is theirs to handle
            return "raised", self.pack(error), afterwards

    def _load(self, definitions: list[Any]) -> list[str]:
        """Load the solution, which finds the classes that the tests define for themselves; list its names."""
        known: dict[str, Any] = {"__name__": "tests"}
        sys.modules["tests"] = types.ModuleType("tests")
        for key, name, source in definitions:
            try:
                exec(compile(source, "tests.py", "exec"), known)
            except Exception:  # noqa: BLE001 - it needs something that is known when tests have begun
                continue
            self.own.classes[key] = known[name]
        ours = {name: known[name] for _, name, _ in definitions if name in known}
        vars(self.names).update(self.load(ours))
        return list(vars(self.names))

    def _define(self, key: str, name: str, source: str, inherits: bool, free: dict[str, Any]) -> Any:
        """Make a class of the tests here. One that ``inherits`` from the solution's is seen as those are."""
        if key not in self.own.classes or inherits:
            names = {**vars(sys.modules["solution"]), **free, "__name__": "tests"}
            exec(compile(source, "tests.py", "exec"), names)
            if inherits:
                return names[name]
            self.own.classes[key] = names[name]
        return self.own.classes[key]

    def _wait(self, awaitable: Any) -> Any:
        if self.runner is None:
            import asyncio  # few programs need it, and it takes long

            self.runner = asyncio.new_event_loop()
            asyncio.set_event_loop(self.runner)
        return self.runner.run_until_complete(awaitable)

    def _register(self, value: Any) -> list[Any]:
        if id(value) in self.borrowed:
            return ["lent", self.borrowed[id(value)][0]]
        twin = None
        if type(value).__module__ == "solution" and not base_values(value):  # a ListNode of its own
            twins = [key for key, kind in self.own.classes.items() if kind.__name__ == type(value).__name__]
            twin = twins[0] if twins else None
        own = self.own.register(value, twin)
        if own is not None:
            return own
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        bases = base_values(value)
        return ["object", self.numbers[id(value)], _nature(value), self.pack(bases)]

    def _find(self, data: list[Any]) -> Any:
        if data[0] == "object":
            return self.objects[data[1]]
        if data[0] != "lent":
            return self.own.find(data)
        _, number, nature, name = data
        for known, proxy in self.borrowed.values():
            if known == number:
                return proxy
        proxy = _PROXIES[nature](functools.partial(self._use_lent, number), name)
        self.borrowed[id(proxy)] = (number, proxy)
        return proxy

    def _use_lent(self, number: int, what: str, *arguments: Any, **keywords: Any) -> Any:
        """Request something of what the tests have lent."""
        with self.turn:
            usage = [number, what, self.pack(arguments), self.pack(keywords)]
            self._send("lent", usage, None)
            while True:  # the tests may request something else first
                request = json.loads(self.requests.readline())
                if request[0] not in ("returned", "raised"):
                    self._send(*self._reply(request))
                    continue
                self.own.restore(request[2], self.rebuild)
                value = self.rebuild(request[1])
                if request[0] == "raised":
                    raise value
                return value

    def _send(self, kind: str, content: Any, afterwards: Any) -> None:
        states = self.own.states(self.pack)
        printed = [each.taken() for each in self.printed]
        self.replies.write(json.dumps([kind, content, afterwards, states, printed]).encode() + b"\n")
        self.replies.flush()


class Printed(io.TextIOWrapper):
    """Output of a solution, which the tests may read."""

    def __init__(self) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, "utf-8", "backslashreplace", write_through=True)

    def taken(self) -> str:
        """Return what was printed since the last time."""
        self.flush()
        data = self.kept.getvalue()
        if data:
            self.kept.seek(0)
            self.kept.truncate()
        return data[:MAX_PRINTED].decode("utf-8", "replace")


class LentInput(io.TextIOBase):
    """The standard input of the tests."""

    def __init__(self, line: Callable[[], str]) -> None:
        self.line = line

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> Any:
        return self.line()

    def read(self, size: int | None = -1, /) -> str:
        return "".join(iter(self.line, ""))


def _nature(value: Any) -> str:
    """Return what a value has to be at the tests' end, since Python's statements take nothing else."""
    if inspect.iscoroutine(value) or inspect.isawaitable(value):
        return "coroutine"
    if inspect.isasyncgen(value):
        return "async generator"
    if inspect.iscoroutinefunction(value):
        return "async function"
    if inspect.isgenerator(value):
        return "generator"
    return "iterator" if hasattr(type(value), "__next__") else "object"


# -- what tests have lent --------------------------------------------------------------------------------


def _function(use: Callable[..., Any], name: str) -> Any:
    def lent(*arguments: Any, **keywords: Any) -> Any:
        return use("call", *arguments, **keywords)

    lent.__name__ = lent.__qualname__ = name
    return lent


def _async_function(use: Callable[..., Any], name: str) -> Any:
    async def lent(*arguments: Any, **keywords: Any) -> Any:
        return use("call", *arguments, **keywords)

    lent.__name__ = lent.__qualname__ = name
    return lent


async def _coroutine(use: Callable[..., Any], name: str) -> Any:
    return use("await")


def _iterator(use: Callable[..., Any], name: str) -> Iterator[Any]:
    while True:
        items = use("next")
        if not items:
            return
        yield items[0]


async def _async_iterator(use: Callable[..., Any], name: str) -> AsyncIterator[Any]:
    for item in _iterator(use, name):
        yield item


class _Object:
    """An object of the tests that is used where it is: a mock, or a file."""

    def __init__(self, use: Callable[..., Any], name: str) -> None:
        vars(self)["_use"] = use

    def __getattr__(self, name: str) -> Any:
        return vars(self)["_use"]("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_use"]("set", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return vars(self)["_use"]("call", *arguments, **keywords)

    def __iter__(self) -> Any:
        return vars(self)["_use"]("iter")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_PROXIES: dict[str, Callable[..., Any]] = {
    "function": _function,
    "async function": _async_function,
    "coroutine": _coroutine,
    "iterator": _iterator,
    "async iterator": _async_iterator,
    "object": _Object,
}

# -- operators -------------------------------------------------------------------------------------------


def _functions(module: types.ModuleType, names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in names.split()}


# Those that ask an object for something of its own,
UNARY = {
    **_functions(builtins, "bool complex float format hash int iter len next repr reversed round str"),
    **_functions(operator, "abs delitem getitem index invert neg pos setitem"),
}
# those that stand between two operands,
ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
LOGIC = ("and", "or", "xor")
COMPARISONS = ("eq", "lt", "le", "gt", "ge")


def _exit(manager: Any, error: Exception | None) -> Any:
    return type(manager).__exit__(manager, type(error) if error else None, error, None)


async def _aexit(manager: Any, error: Exception | None) -> Any:
    return await type(manager).__aexit__(manager, type(error) if error else None, error, None)


def _seed(*arguments: Any) -> None:
    random.seed(*arguments)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(*arguments)


LIBRARY: dict[str, Callable[..., Any]] = {
    "seed": _seed,
    **_functions(copy, "copy deepcopy"),
    **_functions(dataclasses, "asdict astuple fields is_dataclass replace"),
    **_functions(inspect, " ".join(name for name in dir(inspect) if name.startswith("is"))),
    **_functions(inspect, "signature getdoc getmembers getmro"),
    **_functions(builtins, "callable dir type vars"),
    **_functions(typing, "get_type_hints"),
    **_functions(pickle, "dumps loads"),
}
"""Functions of libraries that need the object itself, and no proxy."""

OPERATORS: dict[str, Callable[..., Any]] = {
    **UNARY,
    **{name: getattr(operator, f"__{name}__") for name in (*ARITHMETIC, *LOGIC, *COMPARISONS)},
    # and the statements that use an object.
    "library": lambda name, *arguments, **keywords: LIBRARY[name](*arguments, **keywords),
    "contains": operator.contains,
    "base_values": base_values,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": _exit,
    "aenter": lambda manager: type(manager).__aenter__(manager),
    "aexit": _aexit,
    **_functions(builtins, "isinstance issubclass setattr delattr aiter"),
}
