"""Values on their way between the tests and the solution: written as JSON, and rebuilt by value.

Used by both ends of ``remote``. The solution's end may write anything, so only types that are listed here are
rebuilt, from parts whose types are checked, and nothing is looked up by a name that it writes.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OWN_MODULES = ("solution", "tests")
PLAIN = (type(None), bool, int, float, str)
MAX_JSON_INTEGER = 1 << 63  # JSON writes larger ones in decimal digits, whose number Python limits
NUMPY_TYPE = re.compile(r"[<>|=]([biufc]\d{1,2}|[SU]\d{1,6})")
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
COLLECTIONS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
OBJECT = "object"
ERROR = "error"


@dataclass(frozen=True)
class Parts:
    """A type of the standard library or of numpy that travels as the arguments of ``build``.

    ``take`` returns these arguments, ``types`` are theirs. A value that ``take`` gives none for is an object.
    """

    take: Callable[[Any], tuple[Any, ...] | None]
    types: tuple[Any, ...]
    build: str


def _naive(*names: str) -> Callable[[Any], tuple[Any, ...] | None]:
    """Takes these attributes of a time that has no time zone."""

    def take(value: Any) -> tuple[Any, ...] | None:
        zone = getattr(value, "tzinfo", None)
        return None if zone is not None else tuple(getattr(value, name) for name in names)

    return take


def _array(value: Any) -> tuple[Any, ...] | None:
    plain = NUMPY_TYPE.fullmatch(value.dtype.str)
    return (value.dtype.str, tuple(value.shape), value.tobytes()) if plain else None


def array(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """A numpy array of numbers or texts."""
    if not NUMPY_TYPE.fullmatch(kind):
        raise TypeError(f"an array of type {kind!r} cannot be passed to the tests")
    numpy = importlib.import_module("numpy")
    return numpy.frombuffer(data, numpy.dtype(kind)).reshape(shape).copy()


_DATE = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond")
STANDARD_TYPES: dict[str, Parts] = {
    "builtins.bytearray": Parts(lambda value: (bytes(value),), (bytes,), "builtins.bytearray"),
    "builtins.range": Parts(
        lambda value: (value.start, value.stop, value.step), (int, int, int), "builtins.range"
    ),
    "collections.Counter": Parts(lambda value: (dict(value),), (dict,), "collections.Counter"),
    "collections.OrderedDict": Parts(lambda value: ([*value.items()],), (list,), "collections.OrderedDict"),
    "collections.deque": Parts(
        lambda value: ([*value], value.maxlen), (list, int | None), "collections.deque"
    ),
    "decimal.Decimal": Parts(lambda value: (str(value),), (str,), "decimal.Decimal"),
    "fractions.Fraction": Parts(
        lambda value: (value.numerator, value.denominator), (int, int), "fractions.Fraction"
    ),
    "datetime.date": Parts(_naive(*_DATE), (int,) * 3, "datetime.date"),
    "datetime.datetime": Parts(_naive(*_DATE, *_TIME), (int,) * 7, "datetime.datetime"),
    "datetime.time": Parts(_naive(*_TIME), (int,) * 4, "datetime.time"),
    "datetime.timedelta": Parts(_naive("days", "seconds", "microseconds"), (int,) * 3, "datetime.timedelta"),
    "numpy.ndarray": Parts(_array, (str, tuple, bytes), f"{__name__}.array"),
}


def base_values(value: Any) -> list[Any]:
    """The one value of a built-in type that ``value`` is, or none."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
        value = value.item()
    return [of(value) for base, of in BASE_VALUES.items() if isinstance(value, base)][:1]


def packed(value: Any, refer: Callable[[Any], int]) -> Any:
    """``value`` as data for JSON: a plain value, or a list of the name of its type and its content.

    What is of no listed type becomes ``[OBJECT, refer(it)]``. Classes of libraries are taken for their
    built-in base, as a defaultdict for a dict; those of the solution, whose methods tests may call, are not.
    """
    kind = type(value)
    if kind in PLAIN:
        return ["int", hex(value)] if kind is int and abs(value) >= MAX_JSON_INTEGER else value
    if kind in COLLECTIONS.values():
        return [kind.__name__, [packed(item, refer) for item in value]]
    if kind is dict:
        return ["dict", [[packed(key, refer), packed(item, refer)] for key, item in value.items()]]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if isinstance(value, type) and issubclass(value, Exception):
        return [ERROR, error_names(value)]
    name = f"{kind.__module__}.{kind.__qualname__}"
    parts = STANDARD_TYPES[name].take(value) if name in STANDARD_TYPES else None
    if parts is not None:
        return [name, [packed(part, refer) for part in parts]]
    bases = [] if kind.__module__ in OWN_MODULES else base_values(value)
    return packed(bases[0], refer) if bases else [OBJECT, refer(value)]


def rebuilt(data: Any, find_object: Callable[[int], Any], takes_nan: bool = True) -> Any:
    """The inverse of ``packed``, for data of any content.

    Raises:
        TypeError: the data are none of ``packed``.
        ArithmeticError: there is a NaN among them, and not ``takes_nan``.
    """
    if type(data) in PLAIN:
        return data if takes_nan else _number(data)
    if type(data) is not list or len(data) != 2 or type(data[0]) is not str:
        raise TypeError("the solution has sent no value")
    name, content = data
    again = functools.partial(rebuilt, find_object=find_object, takes_nan=takes_nan)
    if name == OBJECT and type(content) is int:
        return find_object(content)
    if name in ("int", "bytes") and type(content) is str:
        return int(content, 16) if name == "int" else bytes.fromhex(content)
    if type(content) is not list:
        raise TypeError("the solution has sent no value")
    if name in COLLECTIONS:
        return COLLECTIONS[name](map(again, content))
    if name == "dict":
        return {again(key): again(item) for key, item in content}
    if name == ERROR:
        return error_class(tuple(map(str, content)))
    if name == "complex":
        return complex(*(float(again(part)) for part in content))
    return _built(name, [again(part) for part in content], takes_nan)


def _built(name: str, parts: list[Any], takes_nan: bool) -> Any:
    """The value of a listed type, made of parts of exactly the right types."""
    types = STANDARD_TYPES[name].types if name in STANDARD_TYPES else ()
    if not types or len(types) != len(parts):
        raise TypeError(f"the solution has sent a value of the type {name[:100]!r}, which is not listed")
    if not all(isinstance(part, kind) for part, kind in zip(parts, types, strict=True)):
        raise TypeError(f"the solution has sent something else in the place of a {name}")
    module, _, constructor = STANDARD_TYPES[name].build.rpartition(".")
    value = getattr(importlib.import_module(module), constructor)(*parts)
    if name == "numpy.ndarray" and value.dtype.kind in "fc" and not takes_nan:
        _number(float(abs(value).sum()))
    return value


def _number(value: Any) -> Any:
    """``value``, unless it is NaN.

    Raises:
        ArithmeticError: it is. It is neither more nor less than anything, so it would pass a test such as
            ``assert not abs(f() - 3) > 0.1``.
    """
    if type(value) is float and math.isnan(value):
        raise ArithmeticError("the solution returned NaN, which the tests do not name")
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
    known = vars(builtins).get(names[0]) if names else None
    return known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError
