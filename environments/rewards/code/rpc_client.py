"""The tests' end of the pipe to the solution, which runs in another process and is not trusted.

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
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import nullcontext
from typing import IO, Any

from environments.rewards.code.execution import TESTS
from environments.rewards.code.own_objects import OwnObjects, become
from environments.rewards.code.program import ARITHMETIC, COMPARISONS, LOGIC, OPERATORS, UNARY
from environments.rewards.code.values import BASE_VALUES, VALUE_NAMES, packed, rebuilt

_thread = threading.local()
MOST_SHARED = 16  # containers that are looked at before each request, since tests may have changed them
ITERATION = {"next", "__next__", "anext"}
OPERATORS_NUMBER = 1
# Attributes with two underscores that tests may read. By others, libraries let an object say where its memory
# is (numpy's __array_interface__), or what its copy is.
READABLE = {
    *("__name__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__members__", "__wrapped__"),
    *("__module__", "__bases__", "__mro__", "__slots__", "__dataclass_fields__", "__abstractmethods__"),
}
MARKS = ("made_", "makes_", "combined_", "named_")
NUMERIC = {"abs", "complex", "float", "index", "int", "invert", "neg", "pos", "round"}


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
        names = self.request(OPERATORS_NUMBER, "load", (definitions,))
        self.num_requests = 0
        return list(map(str, names))

    def request(
        self, number: int, attribute: str, given: tuple[Any, ...] | None = None, /, **keywords: Any
    ) -> Any:
        """Read an attribute of an object of the solution, and call it where ``given`` are arguments."""
        self.num_requests += attribute != "base_values"
        with nullcontext() if hasattr(_thread, "inside") else self._turn:
            arguments, named = self._pack(given), self._pack(keywords)
            self._send([number, attribute, arguments, named, self._changes()])
            while (reply := self._receive())[0] == "lent":
                self._lend(reply[3], *reply[1])
            kind, content, afterwards, states, _ = reply
            self.own.restore(states, self._value)
            value = content if kind == "argument" else self._value(content)
            if kind == "returned" and given is None and afterwards is not None:
                self._shared[int(afterwards)] = value, self._pack(value)
            elif afterwards is not None:
                args, named_args = map(self._value, afterwards)
                pairs = zip(given or (), args, strict=True)
                for before, after in [*pairs, *((keywords[name], named_args[name]) for name in keywords)]:
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
            return self.request(OPERATORS_NUMBER, "define", (key, name, source, inherits, free))
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
        for stream, text in zip((sys.stdout, sys.stderr), message[-1], strict=True):
            if text:
                stream.write(str(text))
        return message

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
            self.own.restore(states, self._value)
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
    from concurrent.futures import ThreadPoolExecutor

    def run() -> Any:
        _thread.inside = True  # whoever has its turn waits for this
        return asyncio.run(coroutine)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


# -- objects of the solution, as the tests see them --------------------------------------------------------


class Remote:
    """An object of the solution, seen from the tests. Its own methods and operators run where it is.

    What is no plain value judges nothing: an object whose difference from anything is 0 would pass every
    test. So there are two kinds. Of ``made_`` ones the tests themselves say that they are objects: they made
    it from a class, as ``Stack()``, or use attributes of it that no built-in type has. Its methods and
    operators are what they test. Any other is the result of a function, where they expect a value. It has
    attributes, and can be iterated; beside a value of the tests it counts as the value of the built-in type
    that its class derives from, or as none. An operator between two objects asks the solution, for an object.

    ``makes_``: the tests name it as a class that makes objects. ``combined_``: it is what an operator has
    made of such objects, so it has all of their operators too, but none says something of the tests' values.
    ``named_``: the tests know it by its name.
    """

    __slots__ = (*MARKS, "bases_", "client_", "generator_", "items_", "number_", "source_")

    def __init__(self, client: RpcClient, number: int, generator: bool = False, bases: Any = ()) -> None:
        state = {"client_": client, "number_": number, "generator_": generator, "bases_": _plain(bases)}
        state |= dict.fromkeys(MARKS, False)
        for name, value in {**state, "items_": [], "source_": None}.items():
            object.__setattr__(self, name, value)

    def mark_(self, name: str) -> Remote:
        object.__setattr__(self, name, True)
        return self

    def base_values_(self) -> list[Any]:
        """Return its value as one of a built-in type, or none. Only what the tests have made may change."""
        if self.made_ and self.bases_:
            return _plain(self.request_("base_values"))
        return self.bases_

    def is_object_(self) -> bool:
        return bool(self.made_ or self.combined_)

    def request_(self, name: str, *arguments: Any) -> Any:
        return self.client_.request(OPERATORS_NUMBER, name, (self, *arguments))

    # -- attributes ----------------------------------------------------------------------------------

    @property
    def __class__(self) -> Any:
        if self.generator_:
            return types.GeneratorType
        return type(self.bases_[0]) if self.bases_ else Remote

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("an object of the solution keeps its class")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(f"tests cannot use {name!r} of an object of the solution")
        if name not in VALUE_NAMES or self.made_ or self.makes_:
            return self.client_.request(self.number_, name)
        for value in self.base_values_():
            return getattr(value, name)
        found = self.client_.request(self.number_, name) if self.named_ else self
        if type(found) is Remote:  # else it is a plain attribute of a function, as its ``count`` of calls
            raise AttributeError(f"the result of the solution is no value that has {name!r}")
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self.request_("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self.request_("delattr", name)

    def __dir__(self) -> list[str]:
        return [*self.client_.request(self.number_, "__dir__", ())]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self.client_.request(self.number_, "__call__", arguments, **keywords)
        return result.mark_("made_") if self.makes_ and type(result) is Remote else result

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and instance.request_("isinstance", self) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return type(kind) is Remote and kind.request_("issubclass", self) is True

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return ()  # a class that the tests derive from it is made where it is

    # -- what it holds -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self.generator_:
            return self
        if self.made_:
            return iter(self.request_("iter"))
        for value in self.base_values_():
            return iter(value)
        return self.contents_()

    def contents_(self) -> Iterator[Any]:
        """Return what a result yields, the same each time."""
        if self.source_ is None:
            object.__setattr__(self, "source_", self.request_("iter"))
        place = 0
        while True:
            if place == len(self.items_):
                try:
                    self.items_.append(next(self.source_))
                except StopIteration:
                    return
            yield self.items_[place]
            place += 1

    def __next__(self) -> Any:
        return self.request_("next")

    def __len__(self) -> int:
        if self.is_object_():
            return int(self.request_("len"))
        for value in self.base_values_():
            return len(value)
        length = self.request_("len")
        if length != len([*self.contents_()]):
            raise TypeError("the result of the solution has another length than what it yields")
        return int(length)

    def __bool__(self) -> bool:
        if self.is_object_():
            return self.request_("bool") is True
        return all(self.base_values_())

    def __contains__(self, item: object) -> bool:
        if self.made_:
            return self.request_("contains", item) is True
        values = self.base_values_()
        return item in values[0] if values else any(item is each or item == each for each in iter(self))

    def __getitem__(self, key: Any) -> Any:
        if not self.made_:
            for value in self.base_values_():
                return value[key]
            if isinstance(key, int | slice) and not self.named_:
                return [*self.contents_()][key]
        return self.request_("getitem", key)

    # -- operators -----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if type(other) is Remote:
            return self is other or self.request_("eq", other) is True
        for value in self.base_values_():
            return bool(value == other)
        return self.made_ and self.request_("eq", other) is True

    def __hash__(self) -> int:
        for value in self.base_values_():
            return hash(value)
        return hash(self.request_("hash"))

    def __format__(self, how: str) -> str:
        for value in self.base_values_():
            return format(value, how)
        return str(self.request_("format", how) if self.made_ or not how else format(object(), how))

    def __enter__(self) -> Any:
        return self.made_too_(self.request_("enter"))

    def made_too_(self, entered: Any) -> Any:
        """The result of entering an object: one that the tests have made as well, if it is an object."""
        return entered.mark_("made_") if self.made_ and type(entered) is Remote else entered

    def __exit__(self, _: object, error: BaseException | None, __: object) -> Any:
        ends = self.request_("exit", error if isinstance(error, Exception) else None) is True
        return ends and not self.client_.is_verdict(error)

    async def __aenter__(self) -> Any:
        return self.made_too_(await self.request_("aenter"))

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> Any:
        ends = await self.request_("aexit", error if isinstance(error, Exception) else None) is True
        return ends and not self.client_.is_verdict(error)

    def __aiter__(self) -> Any:
        return self.request_("aiter")

    async def __anext__(self) -> Any:
        return self.request_("anext")


def _plain(values: Any) -> list[Any]:
    """``values``, if they are one of a built-in type, else none: the solution's end may write anything."""
    return values if type(values) is list and [type(each) in BASE_VALUES for each in values] == [True] else []


def _unary(name: str) -> Callable[..., Any]:
    own = UNARY[name]

    def request(self: Remote, *arguments: Any) -> Any:
        for value in self.base_values_():
            return own(value, *arguments)
        if name in NUMERIC and not self.is_object_():
            raise TypeError(f"the result of the solution is no number: it has no {name!r}")
        return self.request_(name, *arguments)

    return request


def _between(name: str, swapped: bool = False) -> Callable[[Remote, object], Any]:
    own = OPERATORS[name]

    def operate(self: Remote, other: object) -> Any:
        ours = self.base_values_()
        theirs = other.base_values_() if type(other) is Remote else [other]
        if ours and theirs:
            return own(*theirs, *ours) if swapped else own(*ours, *theirs)
        objects = self.is_object_() and (type(other) is not Remote or other.is_object_())
        if type(other) is not Remote and not self.made_:
            objects = False
            if name in COMPARISONS:
                return NotImplemented
        result = self.client_.request(OPERATORS_NUMBER, name, (other, self) if swapped else (self, other))
        if type(result) is Remote:
            return result.mark_("combined_") if objects else result
        if objects or name in COMPARISONS:
            return result
        raise TypeError(f"the result of the solution is no number: it has no {name!r}")

    return operate


for _name in UNARY.keys() - {"bool", "len", "iter", "next", "hash", "format", "getitem"}:
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in (*ARITHMETIC, *LOGIC, *COMPARISONS[1:]):
    setattr(Remote, f"__{_name}__", _between(_name))
for _name in (*ARITHMETIC, *LOGIC):
    setattr(Remote, f"__r{_name}__", _between(_name, swapped=True))


# -- objects that Python's own statements take ---------------------------------------------------------


async def _coroutine(remote: Remote) -> Any:
    return remote.request_("wait")


def _async_function(remote: Remote) -> Any:
    async def played(*arguments: Any, **keywords: Any) -> Any:
        return await remote(*arguments, **keywords)

    vars(played)["remote_"] = remote
    return played


async def _async_generator(remote: Remote) -> AsyncIterator[Any]:
    while True:
        try:
            item = remote.request_("anext")
        except StopAsyncIteration:
            return
        yield item


_NATURES: dict[str, Callable[[Remote], Any]] = {
    "coroutine": _coroutine,
    "async function": _async_function,
    "async generator": _async_generator,
}
