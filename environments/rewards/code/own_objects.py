"""Objects of classes that the tests define, which both ends of the pipe to the solution have by value.

Used by both ends. What holds what is kept: an object is the same one each time that it is passed, and what a
solution changes in it is changed at the tests' end too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from environments.rewards.code.values import check_state

MOST_WATCHED = 2000
"""Limit of objects; of more, only those that a message names are compared: a solution may keep the others
too."""


class OwnObjects:
    """The objects of ``classes``, which are the tests' and known by their keys, that one end has passed."""

    def __init__(self, first: int) -> None:
        self.classes: dict[str, type] = {}
        self._is_of_tests = first == 0
        self._next = first  # even at one end and odd at the other
        self._objects: dict[int, tuple[Any, str]] = {}
        self._numbers: dict[int, int] = {}  # of objects by their id, which stays theirs since they are kept
        self._waiting: list[int] = []
        self._sent: set[int] = set()
        self._last: dict[int, Any] = {}  # of the states, as the other end knows them

    def key_of(self, kind: type) -> str | None:
        return next((key for key, known in self.classes.items() if known is kind), None)

    def register(self, value: Any, key: str | None = None) -> list[Any] | None:
        """Return the form in which ``value`` travels, if it is one of the tests' classes or of their objects.

        ``key``: of the class that it counts for, where it is of none of them.
        """
        if isinstance(value, type) and (known := self.key_of(value)) is not None:
            return ["class", known]
        key = key or self.key_of(type(value))
        if key is None:
            return None
        if isinstance(value, enum.Enum):
            return ["member", key, value.name]
        if id(value) not in self._numbers:
            self._keep(value, self._next, key)
            self._next += 2
        number = self._numbers[id(value)]
        if number not in self._sent:  # its state goes with the next message
            self._sent.add(number)
            self._waiting.append(number)
        return ["own", number, key]

    def states(self, pack: Callable[[Any], Any]) -> list[Any]:
        """The states of the objects that a message speaks of, and of those that have changed."""
        states = []
        if len(self._objects) <= MOST_WATCHED:
            self._waiting += [number for number in self._objects if number not in self._sent]
        while self._waiting:
            number = self._waiting.pop()
            value, key = self._objects[number]
            state = pack(_state(value))
            if self._last.get(number) != state:
                self._last[number] = state
                states.append([number, key, state])
        self._sent.clear()
        return states

    def find(self, data: list[Any]) -> Any:
        """Return what ``register`` has written at the other end."""
        if data[0] == "class":
            return self.classes[data[1]]
        if data[0] == "member":
            enumeration: Any = self.classes[data[1]]
            return enumeration[data[2]]
        _, number, key = data
        if number not in self._objects:
            self._keep(object.__new__(self.classes[key]), number, key)
        return self._objects[number][0]

    def restore(self, states: list[Any], rebuild: Callable[[Any], Any]) -> None:
        """Give objects the states that the other end has sent."""
        for number, key, packed in states:
            value = self.find(["own", number, key])
            self._last[number] = packed
            state = rebuild(packed)
            if self._is_of_tests:
                changed = [name for name, item in state.items() if getattr(value, name, None) is not item]
                check_state({name: state[name] for name in changed})
            for name in state:
                # One that shadows a method would be called in its place.
                if name.startswith("__") or callable(getattr(type(value), name, None)):
                    raise TypeError(f"an object of the tests has no attribute {name!r} of its own")
            if hasattr(value, "__dict__"):
                vars(value).clear()
            for name, item in state.items():
                object.__setattr__(value, name, item)

    def _keep(self, value: Any, number: int, key: str) -> None:
        self._objects[number] = value, key
        self._numbers[id(value)] = number


def _state(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name) and name[:2] != "__"}
    return {**state, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def become(before: Any, after: Any) -> Any:
    """Change a container to what the other end has made of it; return what is in its place."""
    if before is after or type(before) is not type(after):
        return after
    if isinstance(before, list):
        before[:] = [*map(become, before, after), *after[len(before) :]][: len(after)]
    elif isinstance(before, dict):
        changed = {key: become(before.get(key), item) for key, item in after.items()}
        before.clear()
        before.update(changed)
    elif isinstance(before, set):
        before.intersection_update(after)
        before.update(after)
    elif hasattr(before, "extend"):  # a deque, a bytearray
        before.clear()
        before.extend(after)
    else:
        return after
    return before
