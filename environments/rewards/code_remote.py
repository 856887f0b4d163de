"""Objects of one process, used in another that trusts it with nothing: the solution's, in the tests'.

Part of ``code_driver``, and so of a program in the sandbox: the standard library is all that there is.
"""

from __future__ import annotations

import builtins
import importlib
import marshal
import types
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import IO, Any

NAMES = "__names__"
OWN_MODULES = ("solution", "tests")
# What the value of a subclass is as that of the built-in type, whatever the subclass says of itself.
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
BASE_VALUE = "(base value)"  # no attribute, but asked for like one


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
        module, _, constructor = name.rpartition(".")
        assert name in STANDARD_TYPES
        return getattr(importlib.import_module(module), constructor)(*rebuilt(content, find_object))
    if kind in (list, tuple, set, frozenset):
        return kind(rebuilt(item, find_object) for item in value)
    if kind is dict:
        return {rebuilt(key, find_object): rebuilt(item, find_object) for key, item in value.items()}
    return value


def serve(load: Callable[[], dict[str, Any]], requests: BufferedReader, replies: IO[bytes]) -> None:
    """Be the solution, whose names ``load`` returns: answer requests until the tests hang up.

    A request is ``(object, attribute, arguments, keywords)``: look an attribute up, and call it where there
    are arguments. Object 0 has the names as attributes, and lists them as ``NAMES``. A reply is
    ``("returned", value, lists among the arguments as they are afterwards)`` or ``("raised", type name,
    text)``. Values travel as ``flat`` makes them.
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
            reply = marshal.dumps(("raised", type(error).__name__, str(error)))
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
            known = vars(builtins).get(content)
            if isinstance(known, type) and issubclass(known, Exception):
                raise known(rest)
            raise RuntimeError(f"{content}: {rest}")
        for given, afterwards in zip(arguments or (), rest, strict=False):
            if type(given) is list and type(afterwards) is list:
                given[:] = rebuilt(afterwards, self._object)  # one that sorts in place shall be seen to
        return rebuilt(content, self._object)

    def _object(self, number: int) -> Remote:
        return self.objects.setdefault(number, Remote(self, number))

    @staticmethod
    def _refer(value: Any) -> int:
        if isinstance(value, Remote):
            return value.number_
        raise TypeError(f"tests can pass plain values alone to the solution, not a {type(value).__name__}")


class Remote:
    """An object of the solution, seen from the tests.

    It equals a plain value if it is of a subclass of that type and equal as one, whatever it says itself: a
    solution is told of no value that it is compared with.
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
            return self.line_.ask(self.number_, "__eq__", (other,)) is True
        return bool(self.base_values_() == [other])

    def __hash__(self) -> int:
        return self.line_.ask(self.number_, "__hash__", ())

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
