"""Fields of dataclasses that read as tuples of numbers and are stored in typed arrays.

A tuple is made anew by every access, and costs what it shows: code that only counts, or needs what is new in
a turn, reads what is stored.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable
from itertools import chain, groupby, repeat
from operator import attrgetter
from typing import Any, Generic, TypeVar

from environments.prefix_tree import Span

Number = TypeVar("Number", int, float)


def floats(values: Iterable[float]) -> array[float]:
    """Make an array: in four bytes each where those hold every value exactly, as a model's float32, else in
    eight."""
    exact = array("d", values)
    short = array("f", exact)
    return short if array("d", short).tobytes() == exact.tobytes() else exact


def stored(instance: object, name: str) -> Any:
    """Return the array, or span, of a field: not to be changed."""
    return vars(instance)[f"_{name}"]


def stored_in_each(instances: Iterable[object], name: str) -> list[Any]:
    """Return the array, or span, of a field of each: not to be changed."""
    return [*map(attrgetter(f"_{name}"), instances)]


def packed(values: array[Any]) -> bytes:
    """Write an array as text: the code of its type, a colon, and its bytes in base64.

    JSON's own numbers take three times the bytes, and most of the time in which a trajectory is written.
    """
    return b"%s:%s" % (values.typecode.encode(), b64encode(values))


def unpacked(text: str) -> array[Any]:
    """Return the array that ``packed`` wrote.

    Raises:
        TypeError or ValueError: it did not write ``text``.
    """
    typecode, _, content = str.partition(text, ":")
    values: array[Any] = array(typecode)
    values.frombytes(b64decode(content, validate=True))
    return values


def narrow(values: array[int]) -> array[int]:
    """Return the lowest byte of each value, then the next one of each as far as any of them is not 0."""
    raw = values.tobytes()
    planes = [raw[place::4] for place in range(4)]
    while len(planes) > 1 and not planes[-1].strip(b"\0"):
        planes.pop()
    return array("B", b"".join(planes))


def widened(planes: array[int], count: int) -> array[int]:
    """Return the ``count`` values of which ``narrow`` made ``planes``.

    Raises:
        ValueError: they are others, or so many.
    """
    if not 0 <= count <= len(planes):  # a damaged line would else take any amount of memory
        raise ValueError(f"{len(planes)} bytes for {count} numbers")
    raw = bytearray(4 * count)
    for place in range(-(-len(planes) // max(1, count))):
        raw[place::4] = planes[place * count : (place + 1) * count]
    return array("i", raw)


class _Column(Generic[Number]):
    """A field, stored under its name with a line before it.

    Args:
        is_required: True for a field that its class has no default for.
    """

    def __init__(self, is_required: bool = False) -> None:
        self._is_required = is_required

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object | None, owner: type | None = None) -> tuple[Number, ...]:
        if instance is None:  # dataclass reads the field's default so
            if self._is_required:
                raise AttributeError(self._name)
            return ()
        return self._read(vars(instance)[self._name])

    def _read(self, stored: Any) -> tuple[Number, ...]:
        return tuple(stored)


class TokenIds(_Column[int]):
    """Token ids, four bytes each, as a span of a tree."""

    def __set__(self, instance: object, value: Iterable[int] | Span) -> None:
        vars(instance)[self._name] = value if isinstance(value, Span) else Span.of(value)

    def _read(self, stored: Span) -> tuple[int, ...]:
        return tuple(stored.read())


class Floats(_Column[float]):
    """Numbers as they were given, to the last bit, as ``floats`` stores them."""

    def __set__(self, instance: object, value: Iterable[float]) -> None:
        vars(instance)[self._name] = value if isinstance(value, array) else floats(value)


class Ints(_Column[int]):
    """Whole numbers in four bytes each, or in one with ``typecode`` "b"."""

    def __init__(self, is_required: bool = False, typecode: str = "i") -> None:
        super().__init__(is_required)
        self._typecode = typecode

    def __set__(self, instance: object, value: Iterable[int]) -> None:
        stored = value if isinstance(value, array) else array(self._typecode, tuple(value))
        vars(instance)[self._name] = stored


class Runs(_Column[int]):
    """Whole numbers that seldom change: each with the number of times that it comes in a row.

    An array is what is ``stored`` here, and no row of numbers.
    """

    def __set__(self, instance: object, value: Iterable[int]) -> None:
        runs = ((number, sum(1 for _ in group)) for number, group in groupby(value))
        stored = value if isinstance(value, array) else array("q", chain.from_iterable(runs))
        vars(instance)[self._name] = stored

    def _read(self, stored: array[int]) -> tuple[int, ...]:
        pairs = zip(stored[::2], stored[1::2], strict=True)
        return tuple(chain.from_iterable(repeat(number, count) for number, count in pairs))
