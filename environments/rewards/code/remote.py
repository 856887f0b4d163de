"""Objects of the solution, as the tests see them. Part of ``driver``."""

from __future__ import annotations

import builtins
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from environments.rewards.code.program import ARITHMETIC, BASE_VALUE, COMPARISONS, LOGIC, UNARY
from environments.rewards.code.values import BASE_VALUES, VALUE_NAMES

OPERATORS_NUMBER = 1
# Attributes with two underscores that tests may read. By others, libraries let an object say where its memory
# is (numpy's __array_interface__), or what its copy is.
READABLE = {
    *("__name__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__members__", "__wrapped__"),
    *("__module__", "__bases__", "__mro__", "__slots__", "__dataclass_fields__", "__abstractmethods__"),
}
NUMERIC = {"abs", "complex", "float", "index", "int", "invert", "neg", "pos", "round", "hash"}


class RpcClient(Protocol):
    """The tests' end of the pipe to the solution."""

    def request(
        self, number: int, attribute: str, given: tuple[Any, ...] | None = None, /, **keywords: Any
    ) -> Any: ...

    def is_verdict(self, error: BaseException | None) -> bool: ...


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

    __slots__ = (
        "bases_",
        "client_",
        "combined_",
        "generator_",
        "items_",
        "made_",
        "makes_",
        "named_",
        "number_",
        "source_",
    )

    def __init__(self, client: RpcClient, number: int, generator: bool = False, bases: Any = ()) -> None:
        state = {"client_": client, "number_": number, "generator_": generator, "bases_": _plain(bases)}
        state |= dict.fromkeys(("made_", "makes_", "combined_", "named_"), False)
        for name, value in {**state, "items_": [], "source_": None}.items():
            object.__setattr__(self, name, value)

    def mark_(self, name: str) -> Remote:
        object.__setattr__(self, name, True)
        return self

    def base_values_(self) -> list[Any]:
        """Return its value as one of a built-in type, or none. Only what the tests have made may change."""
        if self.made_ and self.bases_:
            return _plain(self.client_.request(self.number_, BASE_VALUE))
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
        return (
            type(instance) is Remote
            and self.client_.request(OPERATORS_NUMBER, "isinstance", (instance, self)) is True
        )

    def __subclasscheck__(self, kind: Any) -> bool:
        return (
            type(kind) is Remote
            and self.client_.request(OPERATORS_NUMBER, "issubclass", (kind, self)) is True
        )

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
    own = getattr(builtins, name, None) or getattr(operator, name)

    def request(self: Remote, *arguments: Any) -> Any:
        for value in self.base_values_():
            return own(value, *arguments)
        if name in NUMERIC and not self.is_object_():
            raise TypeError(f"the result of the solution is no number: it has no {name!r}")
        return self.request_(name, *arguments)

    return request


def _between(name: str, swapped: bool = False) -> Callable[[Remote, object], Any]:
    own = getattr(operator, f"__{name}__")

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
