"""Values on their way between the tests and the solution: written as JSON, and rebuilt by value.

Used by both ends of the pipe. The solution's end may write anything, so only types that are listed here are
rebuilt, from parts whose types are checked, and nothing is looked up by a name that it writes.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import functools
import importlib
import keyword
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OWN_MODULES = ("solution", "tests", "__main__", "environments.rewards.code.rpc_client")
PLAIN = (type(None), bool, int, float, str)
MAX_JSON_INTEGER = 1 << 63  # JSON writes larger ones in decimal digits, which takes long
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
_OF_LIBRARIES = """
    appendleft popleft rotate maxlen extendleft most_common elements subtract move_to_end
    compare compare_total compare_signal same_quantum quantize samefile relative_to is_relative_to
    days seconds total_seconds year month day hour minute second isoformat strftime weekday
    all any argmax argmin astype columns dtype empty equals eq flatten allclose iloc item loc max mean min
    ndim numpy prod reshape round shape size std sum T to_dict to_list tolist values detach
"""
VALUE_NAMES = {name for kind in (*BASE_VALUES, bytearray, range) for name in dir(kind)} - {"__name__"}
VALUE_NAMES.update(_OF_LIBRARIES.split())
"""Attributes that results of built-in types have, and of those that libraries' ones are: what a test means
by them is the type's own. Any other name is one of the solution's own classes."""
COLLECTIONS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
TYPES = {kind.__name__: kind for kind in (*PLAIN, *BASE_VALUES, object, type, bytearray, range)}
REFERENCES = ("object", "own", "member", "class", "lent")
"""Objects that have no value here travel as one of these, which a ``_register`` has written."""


@dataclass(frozen=True)
class Parts:
    """A type of the standard library or of numpy that travels as the arguments of ``build``: of itself.

    ``take`` returns these arguments, ``types`` are theirs. A value that ``take`` gives none for is an object.
    """

    take: Callable[[Any], tuple[Any, ...] | None]
    types: tuple[Any, ...]
    build: Callable[..., Any] | None = None


def _fixed(*names: str) -> Callable[[Any], tuple[Any, ...] | None]:
    """Takes these attributes; of a time only where it has no time zone, or one of a fixed offset."""

    def take(value: Any) -> tuple[Any, ...] | None:
        zone = getattr(value, "tzinfo", None)
        fixed = zone is None or type(zone) is datetime.timezone
        return tuple(getattr(value, name) for name in names) if fixed else None

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
_TIME = ("hour", "minute", "second", "microsecond", "tzinfo")
_ZONE = datetime.timezone | None
STANDARD_TYPES: dict[str, Parts] = {
    "builtins.bytearray": Parts(lambda value: (bytes(value),), (bytes,)),
    "builtins.range": Parts(_fixed("start", "stop", "step"), (int,) * 3),
    "builtins.slice": Parts(_fixed("start", "stop", "step"), (object,) * 3),
    "collections.Counter": Parts(lambda value: (dict(value),), (dict,)),
    "collections.OrderedDict": Parts(lambda value: ([*value.items()],), (list,)),
    "collections.deque": Parts(lambda value: ([*value], value.maxlen), (list, int | None)),
    "decimal.Decimal": Parts(lambda value: (str(value),), (str,)),
    "fractions.Fraction": Parts(_fixed("numerator", "denominator"), (int, int)),
    "datetime.date": Parts(_fixed(*_DATE), (int,) * 3),
    "datetime.datetime": Parts(_fixed(*_DATE, *_TIME), (*(int,) * 7, _ZONE)),
    "datetime.time": Parts(_fixed(*_TIME), (*(int,) * 4, _ZONE)),
    "datetime.timedelta": Parts(_fixed("days", "seconds", "microseconds"), (int,) * 3),
    "datetime.timezone": Parts(lambda value: (value.utcoffset(None),), (datetime.timedelta,)),
    "pathlib.PosixPath": Parts(lambda value: (str(value),), (str,)),
    "uuid.UUID": Parts(lambda value: (str(value),), (str,)),
    "numpy.ndarray": Parts(_array, (str, tuple, bytes), array),
}


class NaN(float):
    """A NaN of the solution: equal to nothing, as any, but neither more nor less than anything either.

    Else ``assert not abs(f() - 3) > 0.1`` would hold. What is calculated from one is one.
    """

    def _compare(self, _: object) -> bool:
        raise ArithmeticError("the solution returned NaN, which is neither more nor less than anything")

    def _calculate(self, *_: object) -> Any:
        return self

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _calculate
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _calculate
    __abs__ = __neg__ = __pos__ = __round__ = _calculate


def base_values(value: Any) -> list[Any]:
    """The one value of a built-in type that ``value`` is, or none."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
        value = value.item()
    return [of(value) for base, of in BASE_VALUES.items() if isinstance(value, base)][:1]


def packed(value: Any, register: Callable[[Any], list[Any]]) -> Any:
    """``value`` as data for JSON: a plain value, or a list of the name of its type and its content.

    What is of no listed type becomes ``register(it)``. Classes of libraries are taken for their built-in
    base, as a defaultdict for a dict; those of the solution, whose methods tests may call, are not.
    """
    kind = type(value)
    if kind in PLAIN:
        return ["int", hex(value)] if kind is int and abs(value) >= MAX_JSON_INTEGER else value
    if kind in COLLECTIONS.values():
        return [kind.__name__, [packed(item, register) for item in value]]
    if kind is dict:
        return ["dict", [[packed(key, register), packed(item, register)] for key, item in value.items()]]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is NaN:
        return math.nan
    if isinstance(value, type) and issubclass(value, Exception):
        return ["error type", error_names(value)]
    if isinstance(value, Exception):
        return _packed_error(value, register)
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    if _is_record(kind):
        return ["record", [kind.__name__, list(kind._fields), [packed(item, register) for item in value]]]
    name = f"{kind.__module__}.{kind.__qualname__}"
    parts = STANDARD_TYPES[name].take(value) if name in STANDARD_TYPES else None
    if parts is not None:
        return [name, [packed(part, register) for part in parts]]
    bases = [] if kind.__module__ in OWN_MODULES else base_values(value)
    return packed(bases[0], register) if bases else register(value)


def rebuilt(data: Any, find: Callable[[list[Any]], Any], takes_nan: bool = True) -> Any:
    """The inverse of ``packed``, for data of any content. ``find`` finds what ``register`` has written.

    Raises:
        TypeError: the data are none of ``packed``.
        ArithmeticError: there is a NaN among them, and not ``takes_nan``.
    """
    if type(data) in PLAIN:
        return _number(data, takes_nan)
    if type(data) is not list or len(data) < 2 or type(data[0]) is not str:
        raise TypeError("the solution has sent no value")
    if data[0] in REFERENCES:
        return find(data)
    name, content = data
    again = functools.partial(rebuilt, find=find, takes_nan=takes_nan)
    if type(content) is str and name in _TEXTS:
        return _TEXTS[name](content)
    if type(content) is not list:
        raise TypeError("the solution has sent no value")
    return _of_parts(name, content, again, takes_nan)


_TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "type": lambda text: TYPES[text],
}


def _of_parts(name: str, content: list[Any], again: Callable[[Any], Any], takes_nan: bool) -> Any:
    if name in COLLECTIONS:
        return COLLECTIONS[name](map(again, content))
    if name == "dict":
        return {again(key): again(item) for key, item in content}
    if name == "error type":
        return error_class(tuple(map(str, content)))
    if name == "error":
        return _rebuilt_error(again, *content)
    if name == "complex":
        return complex(*(float(again(part)) for part in content))
    if name == "record":
        kind, fields, items = content
        built = record(str(kind), tuple(map(str, fields)))(*map(again, items))
        check_state({field: getattr(built, field) for field in built._fields})
        return built
    return _built(name, [again(part) for part in content], takes_nan)


def _built(name: str, parts: list[Any], takes_nan: bool) -> Any:
    """The value of a listed type, made of parts of exactly the right types."""
    listed = STANDARD_TYPES.get(name)
    if listed is None or len(listed.types) != len(parts):
        raise TypeError(f"the solution has sent a value of the type {name[:100]!r}, which is not listed")
    if not all(isinstance(part, kind) for part, kind in zip(parts, listed.types, strict=True)):
        raise TypeError(f"the solution has sent something else in the place of a {name}")
    module, _, constructor = name.rpartition(".")
    value = (listed.build or getattr(importlib.import_module(module), constructor))(*parts)
    if name == "numpy.ndarray" and value.dtype.kind in "fc":
        _number(float(abs(value).sum()), takes_nan)
    if name == "decimal.Decimal":
        _number(math.nan if value.is_nan() else 0.0, takes_nan)
    return value


def _number(value: Any, takes_nan: bool) -> Any:
    """``value``; a NaN as one that judges nothing.

    Raises:
        ArithmeticError: it is a NaN, and the tests are about none.
    """
    if type(value) is float and math.isnan(value):
        if not takes_nan:
            raise ArithmeticError("the solution returned NaN, which the tests do not name")
        return NaN(value)
    return value


def check_state(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of what the solution has sent, none of them a function in the place of a value's method.

    Raises:
        TypeError: one is, as ``startswith``: the tests would take its word for their verdict.
    """
    for name, value in state.items():
        if name in VALUE_NAMES and callable(value):
            raise TypeError(f"the solution has sent a function in the place of the method {name!r}")
    return state


@functools.cache
def record(name: str, fields: tuple[str, ...]) -> Any:
    """The namedtuple of this name: at the other end of the pipe there is one with the same fields."""
    if not all(each.isidentifier() and not keyword.iskeyword(each) for each in (name, *fields)):
        raise TypeError("the solution has sent no value")
    return collections.namedtuple(name, fields)


def _is_record(kind: type) -> bool:
    """Return whether it is a namedtuple that has nothing of its own."""
    fields = getattr(kind, "_fields", None)
    if not (issubclass(kind, tuple) and kind.__bases__ == (tuple,) and isinstance(fields, tuple)):
        return False
    plain = vars(record("Plain", ())).keys() | {*fields, "__annotations__", "__orig_bases__"}
    return kind.__name__.isidentifier() and vars(kind).keys() <= plain


# -- errors ----------------------------------------------------------------------------------------------

_MODULES_OF_ERRORS = """
    asyncio ast binascii configparser copy csv dataclasses decimal email enum fractions gzip json lzma numpy
    pickle queue re sqlite3 statistics struct subprocess tarfile urllib xml zipfile zlib zoneinfo
"""
ERROR_MODULES = frozenset(_MODULES_OF_ERRORS.split())
"""The libraries whose errors are the same at both ends."""
_own_errors: dict[tuple[str, ...], type[Exception]] = {}


class _OwnErrors(type):
    """The class of error classes that stand for one of the solution's, which makes their instances."""

    make_: Callable[..., Any] | None = None

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls.make_ is not None:
            return cls.make_(arguments, **keywords)
        return super().__call__(*arguments, **keywords)


def error_names(kind: type[Exception]) -> tuple[str, ...]:
    """The name of an error, and of its bases up to the first that both ends have."""
    names: list[str] = []
    for base in kind.__mro__:
        dotted = f"{base.__module__}.{base.__qualname__}"
        if base.__module__ == "builtins" or _library_error(dotted) is base:
            names.append(base.__name__ if base.__module__ == "builtins" else dotted)
            break
        names.append(base.__name__)
    if len(names) > 1:
        _own_errors.setdefault(tuple(names), kind)
    return tuple(names)


def error_class(names: tuple[str, ...]) -> type[Exception]:
    """The error of these ``error_names``: the same one, or one of our own with such bases."""
    if names in _own_errors:
        return _own_errors[names]
    if len(names) > 1:
        base = error_class(names[1:])
        methods = {"__str__": lambda self: vars(self).get("text_") or base.__str__(self)}
        kind: Any = _OwnErrors(names[0], (base,), methods)
        return _own_errors.setdefault(names, kind)
    known = vars(builtins).get(names[0]) or _library_error(names[0]) if names else None
    return known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError


def _library_error(dotted: str) -> type[Exception] | None:
    module, _, name = dotted.rpartition(".")
    if module.partition(".")[0] not in ERROR_MODULES:
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _packed_error(error: Exception, register: Callable[[Any], list[Any]]) -> list[Any]:
    names = error_names(type(error))
    state = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return ["error", [names, packed(error.args, register), str(error), packed(state, register)]]


def _rebuilt_error(again: Callable[[Any], Any], names: Any, args: Any, text: Any, state: Any) -> Exception:
    kind, given = error_class(tuple(map(str, names))), again(args)
    if kind.__module__ == "builtins" and len(names) == 1:
        error = kind(*given)
    else:  # its own __init__ has run where it was raised
        error = kind.__new__(kind, *given)
        error.args = given
        error.__dict__["text_"] = str(text)
    error.__dict__.update(check_state(again(state)))
    return error
