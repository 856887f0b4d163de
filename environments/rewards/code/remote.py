"""Proxies by which the tests use objects of the solution, which runs in another process and is not trusted.

Part of ``driver``, and so of a program in the sandbox: the standard library is all that there is.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import marshal
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import IO, Any

NAMES = "__names__"
OPERATORS_NUMBER = 1
OWN_MODULES = ("solution", "tests")
# The value of a subclass as that of its built-in type, whichever methods the subclass overrides.
BASE_VALUES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}
# Types that travel between the processes as the arguments of their constructor.
STANDARD_TYPES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.bytearray": lambda value: (bytes(value),),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
}
OBJECT = "(object)"
ERROR = "(error)"
BASE_VALUE = "(base value)"  # no attribute, but asked for like one

# Python's operators: those that ask an object for something of its own,
FORWARDED: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("bool", "float", "hash", "int", "iter", "len", "next")},
    **{name: getattr(builtins, name) for name in ("repr", "reversed", "round", "str")},
    **{name: getattr(operator, name) for name in ("abs", "index", "invert", "neg", "pos")},
    **{name: getattr(operator, name) for name in ("contains", "delitem", "getitem", "setitem")},
}
# and those that stand between two operands.
ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
LOGIC = ("and", "or", "xor")
COMPARISONS = ("eq", "lt", "le", "gt", "ge")
OPERATORS = types.SimpleNamespace(
    **FORWARDED,
    **{name: getattr(operator, f"__{name}__") for name in (*ARITHMETIC, *LOGIC, *COMPARISONS)},
)


def base_values(value: Any) -> list[Any]:
    """The one value of a built-in type that ``value`` is, or none."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
        value = value.item()
    return [of(value) for base, of in BASE_VALUES.items() if isinstance(value, base)][:1]


def flat(value: Any, refer: Callable[[Any], int]) -> Any:
    """``value`` as marshal can hold it: of built-in types exactly, and no subclass with ideas of its own.

    In the place of anything else stands ``(..., type, arguments)`` or ``(..., OBJECT, refer(it))``. Classes
    of libraries are taken for their built-in base, as a defaultdict for a dict; those of the solution, whose
    methods tests may call, are not.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return value
    if kind in (list, tuple, set, frozenset):
        return kind(flat(item, refer) for item in value)
    if kind is dict:
        return {flat(key, refer): flat(item, refer) for key, item in value.items()}
    if isinstance(value, type) and issubclass(value, Exception):
        return ..., ERROR, error_names(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in STANDARD_TYPES:
        return ..., name, flat(STANDARD_TYPES[name](value), refer)
    bases = [] if kind.__module__ in OWN_MODULES else base_values(value)
    return flat(bases[0], refer) if bases else (..., OBJECT, refer(value))


def rebuilt(value: Any, find_object: Callable[[int], Any]) -> Any:
    """The inverse of ``flat``."""
    kind = type(value)
    if kind is tuple and value[:1] == (...,):
        _, name, content = value
        if name == OBJECT:
            return find_object(content)
        if name == ERROR:
            return error_class(content)
        module, _, constructor = name.rpartition(".")
        assert name in STANDARD_TYPES
        return getattr(importlib.import_module(module), constructor)(*rebuilt(content, find_object))
    if kind in (list, tuple, set, frozenset):
        return kind(rebuilt(item, find_object) for item in value)
    if kind is dict:
        return {rebuilt(key, find_object): rebuilt(item, find_object) for key, item in value.items()}
    return value


def error_names(kind: type[Exception]) -> tuple[str, ...]:
    """The name of an error, and of its bases up to the first that is built in."""
    bases = kind.__mro__
    own = [base.__module__ == "builtins" for base in bases].index(True)
    return tuple(base.__name__ for base in bases[: own + 1])


@functools.cache
def error_class(names: tuple[str, ...]) -> type[Exception]:
    """The error of these ``error_names``: the built-in one, or one of our own with such bases."""
    if len(names) > 1:
        return type(names[0], (error_class(names[1:]),), {})
    known = vars(builtins).get(names[0])
    return known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError


def serve(load: Callable[[], dict[str, Any]], requests: BufferedReader, replies: IO[bytes]) -> None:
    """Be the solution, whose names ``load`` returns: answer requests until the tests hang up.

    A request is ``(object, attribute, arguments, keywords)``: look an attribute up, and call it where there
    are arguments. Object 0 has the names as attributes, and lists them as ``NAMES``; object 1 has the
    ``OPERATORS``. A reply is ``("returned", value, lists among the arguments as they are afterwards)`` or
    ``("raised", error_names, arguments of the error)``. Values travel as ``flat`` makes them.
    """
    objects: list[Any] = []
    numbers: dict[int, int] = {}  # of objects by their id, which stays theirs since they are kept

    def refer(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def answer(number: int, attribute: str, arguments: Any, keywords: Any) -> tuple[Any, ...]:
        if not objects:
            names = load()
            refer(types.SimpleNamespace(**{**names, NAMES: list(names)}))
            refer(OPERATORS)
        if attribute == BASE_VALUE:
            return "returned", flat(base_values(objects[number]), refer), []
        value, given = getattr(objects[number], attribute), []
        if arguments is not None:
            given = rebuilt(arguments, objects.__getitem__)
            value = value(*given, **rebuilt(keywords, objects.__getitem__))
        lists = [flat(item, refer) if type(item) is list else None for item in given]
        return "returned", flat(value, refer), lists

    while requests.peek(1):
        try:
            reply = marshal.dumps(answer(*marshal.load(requests)))
        except Exception as error:  # noqa: BLE001 - the tests may expect it, so it is theirs to handle
            names = error_names(type(error))
            said = error.args if len(names) == 1 else (str(error),)
            reply = marshal.dumps(("raised", names, flat(said, refer)))
        replies.write(reply)
        replies.flush()


@dataclass(frozen=True)
class Line:
    """The tests' end of the line to the solution."""

    requests: IO[bytes]
    replies: IO[bytes]
    objects: dict[int, Remote]

    def ask(
        self, number: int, attribute: str, arguments: tuple[Any, ...] | None = None, **keywords: Any
    ) -> Any:
        request = number, attribute, flat(arguments, self._refer), flat(keywords, self._refer)
        try:
            marshal.dump(request, self.requests)
            self.requests.flush()
            kind, content, rest = marshal.load(self.replies)
        except (BrokenPipeError, EOFError) as error:
            raise RuntimeError("the solution ended the program") from error
        if kind == "raised":
            raise error_class(content)(*rebuilt(rest, self._object))
        for given, afterwards in zip(arguments or (), rest, strict=False):
            if type(given) is list and type(afterwards) is list:
                given[:] = rebuilt(
                    afterwards, self._object
                )  # so that a function that sorts in place passes its test
        return rebuilt(content, self._object)

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
    """

    def __init__(self, line: Line, number: int) -> None:
        self.line_ = line
        self.number_ = number

    def base_values_(self) -> list[Any]:
        """Its value as one of a built-in type, or none."""
        values = self.line_.ask(self.number_, BASE_VALUE)
        return values if type(values) is list and len(values) == 1 else []

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self.line_.ask(OPERATORS_NUMBER, "eq", (self, other)) is True
        return bool(self.base_values_() == [other])

    def __getattr__(self, name: str) -> Any:
        return self.line_.ask(self.number_, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.line_.ask(self.number_, "__call__", arguments, **keywords)


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
