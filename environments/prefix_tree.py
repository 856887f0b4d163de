"""Sequences of whole numbers that share their beginnings, each shared part stored once.

A conversation's turns are such sequences: a prompt repeats the turn before it, or an earlier one up to the
place where the history was rewritten. Memory grows with what differs, and so does a pickle.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

ROOT = -1
"""Node that stands before all others; it holds nothing."""


def numbers(values: Iterable[int]) -> array[int]:
    """An array of ``values``, in four bytes each."""
    return values if isinstance(values, array) else array("i", tuple(values))


class PrefixTree:
    """Stores sequences: each leaves the one with which it shares most at the first number that differs.

    A node holds the numbers of one branch: a part, and the position at which it begins. No two branches of
    a node begin with the same number at the same position, so equal beginnings lie in the same nodes, and to
    compare two sequences of a tree is to compare where they leave each other.
    """

    __slots__ = ("_branches", "_latest", "_parents", "_parts", "_starts")

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._starts: list[int] = []
        """Positions at which the nodes' parts begin: that many numbers stand before them."""
        self._parts: list[array[int]] = []
        self._branches: dict[tuple[int, int, int], int] | None = {}
        """Nodes by their parent, their start and their first number. Made anew where a sequence is added
        after a pickle."""
        self._latest: tuple[array[int], int] | None = None
        """The sequence that was stored last as a whole, and its last node: the next one shares most of it."""

    def __getstate__(self) -> tuple[list[int], list[int], list[array[int]]]:
        return self._parents, self._starts, self._parts

    def __setstate__(self, state: tuple[list[int], list[int], list[array[int]]]) -> None:
        self._parents, self._starts, self._parts = state
        self._branches = self._latest = None

    @classmethod
    def of(cls, parents: list[int], starts: list[int], parts: list[array[int]]) -> Self:
        """The tree that ``rows`` has described.

        Raises:
            IndexError or ValueError: they describe none.
        """
        tree = cls()
        for number, (parent, start, part) in enumerate(zip(parents, starts, parts, strict=True)):
            if not (len(part) and ROOT <= parent < number):
                raise ValueError(f"node {number} of a tree has {len(part)} numbers behind node {parent}")
            tree.span(parent, start)
            tree._parents.append(parent)
            tree._starts.append(start)
            tree._parts.append(part)
        tree._branches = None
        return tree

    def span(self, node: int, stop: int) -> Span:
        """The sequence whose ``stop`` numbers end in ``node``. Raises ``ValueError`` if none does."""
        first = 0 if node == ROOT else self._starts[node] + 1
        last = 0 if node == ROOT else self._starts[node] + len(self._parts[node])
        if not first <= stop <= last:
            raise ValueError(f"{stop} numbers do not end in node {node} of a tree")
        return Span(self, node, 0, stop)

    @property
    def root(self) -> Span:
        """The empty sequence, from which all others begin."""
        return Span(self, ROOT, 0, 0)

    def insert(self, node: int, position: int, new: array[int]) -> tuple[int, int]:
        """Store the sequence that goes on with ``new`` after ``position`` numbers up to ``node``.

        Returns:
            Its last node, and its length.
        """
        if node != ROOT or not self._parts:
            return self._insert(node, position, new, 0)
        done = 0
        if self._latest is not None:  # so that the nodes of what it shares are not passed one by one
            before, node = self._latest
            done = _num_equal(before, 0, new, 0)
        node, position = self._insert(node, done, new, done)
        self._latest = new, node
        return node, position

    def _insert(self, node: int, position: int, new: array[int], done: int) -> tuple[int, int]:
        while node != ROOT and position <= self._starts[node]:
            node = self._parents[node]
        while True:
            if node != ROOT:
                count = _num_equal(self._parts[node], position - self._starts[node], new, done)
                done, position = done + count, position + count
            if done == len(new):
                return node, position
            branch = self._branch(node, position, new[done])
            if branch is None:
                break
            node = branch
        if node != ROOT and position == self._starts[node] + len(self._parts[node]):
            self._parts[node].extend(new[done:])  # what only goes on needs no node of its own
        else:
            node = self._add_node(node, position, new[done:])
        return node, position + len(new) - done

    def read(self, node: int, start: int, stop: int) -> array[int]:
        """The numbers ``start`` to ``stop`` of the sequence that ends in ``node``."""
        pieces: list[array[int]] = []
        while stop > start:
            begin = self._starts[node]
            if stop > begin:
                pieces.append(self._parts[node][max(0, start - begin) : stop - begin])
                stop = begin
            node = self._parents[node]
        if len(pieces) == 1:
            return pieces[0]
        read = array("i")
        for piece in reversed(pieces):
            read.extend(piece)
        return read

    def path(self, node: int, stop: int) -> Iterable[tuple[int, int]]:
        """The nodes of a sequence of the length ``stop``, the last one first, and where it leaves each."""
        while node != ROOT:
            if stop > self._starts[node]:
                yield node, stop
            stop = min(stop, self._starts[node])
            node = self._parents[node]

    def rows(self, spans: Sequence[Span]) -> tuple[list[int], list[int], list[array[int]], list[int]]:
        """A tree of these sequences alone: of each node the one before it, its start and its numbers, and of
        each sequence its last node."""
        reached: dict[int, int] = {}
        ends = []
        for _, node, _, stop in reversed(spans):  # the longest mostly comes last, and has passed all nodes
            while node != ROOT and stop <= self._starts[node]:
                node = self._parents[node]
            ends.append(node)
            while node != ROOT and reached.get(node, 0) < stop:
                reached[node] = stop
                node, stop = self._parents[node], self._starts[node]
        kept = sorted(reached)  # a node stands behind the one before it
        own = {node: number for number, node in enumerate([ROOT, *kept], ROOT)}
        starts = [self._starts[node] for node in kept]
        parts = [self._parts[node][: reached[node] - self._starts[node]] for node in kept]
        parents = [own[self._parents[node]] for node in kept]
        return parents, starts, parts, [own[end] for end in reversed(ends)]

    def num_shared(self, one: tuple[int, int], other: tuple[int, int]) -> int:
        """Length of the beginning that two sequences share, each given as its last node and its length."""
        (node, stop), (other_node, other_stop) = one, other
        while node != other_node:
            if other_node == ROOT or (node != ROOT and self._starts[node] >= self._starts[other_node]):
                stop, node = min(stop, self._starts[node]), self._parents[node]
            else:
                other_stop = min(other_stop, self._starts[other_node])
                other_node = self._parents[other_node]
        return min(stop, other_stop) if node != ROOT else 0

    def _branch(self, node: int, position: int, first: int) -> int | None:
        if self._branches is None:
            self._branches = {}
            rows = zip(self._parents, self._starts, self._parts, strict=True)
            for index, (parent, start, part) in enumerate(rows):
                self._branches[parent, start, part[0]] = index
        return self._branches.get((node, position, first))

    def _add_node(self, parent: int, start: int, part: array[int]) -> int:
        assert self._branches is not None  # `_branch` came before
        node = len(self._parts)
        self._parents.append(parent)
        self._starts.append(start)
        self._parts.append(part)
        self._branches[parent, start, part[0]] = node
        return node


class Span(NamedTuple):
    """The numbers ``start`` to ``stop`` of a sequence in a tree, whose last one lies in ``node``."""

    tree: PrefixTree
    node: int
    start: int
    stop: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Self:
        """A sequence that begins a tree."""
        return cls(*PrefixTree().root).extended(values)

    @property
    def size(self) -> int:
        """Number of its numbers."""
        return self.stop - self.start

    def read(self) -> array[int]:
        """A copy of its numbers."""
        return self.tree.read(self.node, self.start, self.stop)

    def part(self, start: int, stop: int) -> Self:
        """The numbers from ``start`` to ``stop`` of the whole sequence, as far as it has them."""
        return type(self)(self.tree, self.node, start, min(stop, self.stop))

    def extended(self, values: Iterable[int]) -> Self:
        """The whole sequence up to the end of this one, and ``values`` behind it."""
        node, stop = self.tree.insert(self.node, self.stop, numbers(values))
        return self._replace(node=node, start=0, stop=stop)

    def num_shared(self, other: Span) -> int:
        """Length of the beginning that the whole sequences share, as far as these two go."""
        if self.tree is other.tree:
            return self.tree.num_shared((self.node, self.stop), (other.node, other.stop))
        one, two = self.tree.read(self.node, 0, self.stop), other.tree.read(other.node, 0, other.stop)
        return _num_equal(one, 0, two, 0)


class Repeats:
    """Finds, for sequences of one tree that come one after the other, the earlier one that each repeats."""

    def __init__(self) -> None:
        self._reached: dict[int, tuple[int, int]] = {}
        """The farthest position that was reached in a node, and the name of the sequence that did it."""
        self._last: tuple[int, Span] | None = None

    def longest(self, span: Span) -> tuple[int, int]:
        """The name of the earlier sequence that shares the longest beginning with ``span``, and its length.

        The last one is preferred to others that share as much; without any, the name is -1.
        """
        found = (-1, 0) if self._last is None else (self._last[0], span.num_shared(self._last[1]))
        for node, stop in span.tree.path(span.node, span.stop):
            if node in self._reached:
                reached, name = self._reached[node]
                return (name, min(stop, reached)) if min(stop, reached) > found[1] else found
        return found

    def add(self, name: int, span: Span) -> None:
        """Note a sequence, which those that come later may repeat."""
        for node, stop in span.tree.path(span.node, span.stop):
            if self._reached.get(node, (0, 0))[0] >= stop:
                break
            self._reached[node] = stop, name
        self._last = name, span


def _num_equal(one: array[int], start: int, other: array[int], other_start: int) -> int:
    """Number of equal numbers from ``start`` of ``one`` and ``other_start`` of ``other`` on."""
    high = min(len(one) - start, len(other) - other_start)
    if one[start : start + high] == other[other_start : other_start + high]:
        return high
    low = 0
    while low < high:  # by halves: slices are compared a hundred times faster than one after the other
        middle = (low + high + 1) // 2
        if one[start + low : start + middle] == other[other_start + low : other_start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
