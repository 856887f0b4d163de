"""Proxies by which the tests use objects of the solution, which runs in another process and is not trusted.

Part of ``driver``, and so of a program in the sandbox: the standard library is all that there is.
"""

from __future__ import annotations

import builtins
import json
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import IO, Any

from environments.rewards.code.values import (
    BASE_VALUES,
    base_values,
    error_class,
    error_names,
    packed,
    rebuilt,
)

NAMES = "__names__"
OPERATORS_NUMBER = 1
BASE_VALUE = "(base value)"  # no attribute, but asked for like one
# Attributes with two underscores that tests may read. By others, libraries let an object say where its memory
# is (numpy's __array_interface__), or what its copy is.
READABLE = {"__name__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__members__"}
# Methods of built-in types that say yes or no about their argument, which is what a test expects.
PREDICATES = {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals"}
ITERATION = {"next", "__next__"}

# Python's operators: those that ask an object for something of its own,
FORWARDED: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("bool", "float", "hash", "int", "iter", "len", "next")},
    **{name: getattr(builtins, name) for name in ("repr", "reversed", "round", "str")},
    **{name: getattr(operator, name) for name in ("abs", "index", "invert", "neg", "pos")},
    **{name: getattr(operator, name) for name in ("delitem", "getitem", "setitem")},
}
# and those that stand between two operands.
ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
LOGIC = ("and", "or", "xor")
COMPARISONS = ("eq", "lt", "le", "gt", "ge")
OPERATORS = types.SimpleNamespace(
    **FORWARDED,
    contains=operator.contains,
    **{name: getattr(operator, f"__{name}__") for name in (*ARITHMETIC, *LOGIC, *COMPARISONS)},
)


def serve(load: Callable[[], dict[str, Any]], requests: BufferedReader, replies: IO[bytes]) -> None:
    """Be the solution, whose names ``load`` returns: answer requests until the tests hang up.

    A request is ``(object, attribute, arguments, keywords)``: look an attribute up, and call it where there
    are arguments. Object 0 has the names as attributes, and lists them as ``NAMES``; object 1 has the
    ``OPERATORS``. A reply is ``["returned", value, lists among the arguments as they are afterwards]`` or
    ``["raised", error_names, arguments of the error]``. Both are lines of JSON, of ``packed`` values.
    """
    objects: list[Any] = []
    numbers: dict[int, int] = {}  # of objects by their id, which stays theirs since they are kept

    def refer(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def answer(number: int, attribute: str, arguments: Any, keywords: Any) -> list[Any]:
        if not objects:
            names = load()
            refer(types.SimpleNamespace(**{**names, NAMES: list(names)}))
            refer(OPERATORS)
        if attribute == BASE_VALUE:
            return ["returned", packed(base_values(objects[number]), refer), []]
        value, given = getattr(objects[number], attribute), []
        if arguments is not None:
            given = rebuilt(arguments, objects.__getitem__)
            value = value(*given, **rebuilt(keywords, objects.__getitem__))
        lists = [packed(item, refer) if type(item) is list else None for item in given]
        return ["returned", packed(value, refer), lists]

    for request in requests:
        try:
            reply = json.dumps(answer(*json.loads(request)))
        except Exception as error:  # noqa: BLE001 - the tests may expect it, so it is theirs to handle
            names = error_names(type(error))
            said = error.args if len(names) == 1 else (str(error),)
            reply = json.dumps(["raised", names, packed(said, refer)])
        replies.write(reply.encode() + b"\n")
        replies.flush()


@dataclass(frozen=True)
class Line:
    """The tests' end of the line to the solution. ``takes_nan``: whether the tests expect a NaN."""

    requests: IO[bytes]
    replies: IO[bytes]
    objects: dict[int, Remote]
    takes_nan: bool = True

    def ask(
        self, number: int, attribute: str, arguments: tuple[Any, ...] | None = None, **keywords: Any
    ) -> Any:
        given = packed(arguments, self._refer), packed(keywords, self._refer)
        try:
            self.requests.write(json.dumps([number, attribute, *given]).encode() + b"\n")
            self.requests.flush()
            line = self.replies.readline()
        except BrokenPipeError as error:
            raise RuntimeError("the solution ended the program") from error
        if not line:
            raise RuntimeError("the solution ended the program")
        kind, content, rest = json.loads(line)
        if kind == "raised":
            raise self._error(tuple(map(str, content)), attribute)(*self._value(rest))
        for before, afterwards in zip(arguments or (), rest, strict=False):
            if type(before) is list and afterwards is not None:
                # So that a function that sorts in place passes its test.
                before[:] = list(self._value(afterwards))
        return self._value(content)

    def _value(self, data: Any) -> Any:
        return rebuilt(data, self._object, self.takes_nan)

    @staticmethod
    def _error(names: tuple[str, ...], attribute: str) -> type[Exception]:
        """The error of these names. One that ends an iteration does so only where something is iterated.

        Else it would end an ``all(map(...))`` of the tests before its end, which is then true.
        """
        kind = error_class(names)
        ends = issubclass(kind, StopIteration | StopAsyncIteration)
        return RuntimeError if ends and attribute not in ITERATION else kind

    def _object(self, number: int) -> Remote:
        return self.objects.setdefault(number, Remote(self, number))

    @staticmethod
    def _refer(value: Any) -> int:
        if isinstance(value, Remote):
            return value.number_
        raise TypeError(f"tests can pass plain values alone to the solution, not a {type(value).__name__}")


class Remote:
    """An object of the solution, seen from the tests. Its methods and operators run where it is.

    But its operators do not run on values of the tests: an object whose difference from anything is 0 would
    pass every test. So operators work between objects of the solution. Beside a value of the tests, an object
    whose class derives from a built-in type counts as the value of that type; its own methods do not.

    ``is_class_``: the tests name it as a class, as ``Stack``. ``is_own_``: the tests made it from such a
    class, so its methods are what they test. Any other object is the result of a function, where they expect
    a value: what it says of itself when it is asked whether it holds something does not count.
    """

    def __init__(self, line: Line, number: int) -> None:
        self.line_ = line
        self.number_ = number
        self.is_class_ = False
        self.is_own_ = False

    def base_values_(self) -> list[Any]:
        """Its value as one of a built-in type, or none."""
        values = self.line_.ask(self.number_, BASE_VALUE)
        return (
            values
            if type(values) is list and [type(value) in BASE_VALUES for value in values] == [True]
            else []
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self.line_.ask(OPERATORS_NUMBER, "eq", (self, other)) is True
        return bool(self.base_values_() == [other])

    def __contains__(self, item: object) -> bool:
        if self.is_own_:
            return self.line_.ask(OPERATORS_NUMBER, "contains", (self, item)) is True
        values = self.base_values_()
        return item in values[0] if values else any(item == each for each in iter(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(f"tests cannot use {name!r} of an object of the solution")
        if name in PREDICATES and not self.is_own_:
            for value in self.base_values_():
                return getattr(value, name)
            raise AttributeError(f"the result of the solution is no value that has {name!r}")
        return self.line_.ask(self.number_, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self.line_.ask(self.number_, "__call__", arguments, **keywords)
        if isinstance(result, Remote):
            result.is_own_ |= self.is_class_
        return result


def _forwarded(name: str) -> Callable[..., Any]:
    def ask(self: Remote, *arguments: Any) -> Any:
        return self.line_.ask(OPERATORS_NUMBER, name, (self, *arguments))

    return ask


def _between(name: str, swapped: bool = False) -> Callable[[Remote, object], Any]:
    def operate(self: Remote, other: object) -> Any:
        if isinstance(other, Remote):
            return self.line_.ask(OPERATORS_NUMBER, name, (self, other))
        values = self.base_values_()
        if not values:
            return NotImplemented
        return getattr(OPERATORS, name)(*((other, *values) if swapped else (*values, other)))

    return operate


for _name in FORWARDED:
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*ARITHMETIC, *LOGIC, *COMPARISONS[1:]):
    setattr(Remote, f"__{_name}__", _between(_name))
for _name in (*ARITHMETIC, *LOGIC):
    setattr(Remote, f"__r{_name}__", _between(_name, swapped=True))
