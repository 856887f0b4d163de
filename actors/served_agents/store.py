"""Keeps the newest things of every API key: responses, tasks of A2A, answers by idempotency key."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from policies.model_api.limits import MAX_STORED

T = TypeVar("T")


class PerKeyLRU(Generic[T]):
    """The newest things of every owner, by name. A client can push out its own things, not another's.

    Args:
        most: things of one owner.
        size: returns the size of a thing.
        most_size: of all things of one owner together.
    """

    def __init__(
        self, most: int = MAX_STORED, size: Callable[[T], int] = lambda thing: 0, most_size: int = 0
    ) -> None:
        self._most, self._size, self._most_size = most, size, most_size
        self._things: defaultdict[str, OrderedDict[str, T]] = defaultdict(OrderedDict)

    def keep(self, owner: str, name: str, thing: T) -> None:
        """Keep a thing, new or changed. The one that has not changed for the longest time may have to go."""
        things = self._things[owner]
        things[name] = thing
        things.move_to_end(name)
        while len(things) > self._most or sum(map(self._size, things.values())) > self._most_size:
            things.popitem(last=False)

    def replace(self, owner: str, name: str, old: T, new: T) -> bool:
        """Keep ``new`` in the place of ``old``, if that is still what is kept; return whether it was."""
        is_unchanged = self.kept(owner, name) == old
        if is_unchanged:
            self.keep(owner, name, new)
        return is_unchanged

    def kept(self, owner: str, name: str) -> T | None:
        """The thing of this name, if it is kept and belongs to ``owner``."""
        return self._things[owner].get(name)

    def all_kept(self, owner: str) -> list[T]:
        """The things of ``owner``, the newest last."""
        return list(self._things[owner].values())

    def forget(self, owner: str, name: str) -> bool:
        """Keep the thing no more; return whether it was kept."""
        return self._things[owner].pop(name, None) is not None
