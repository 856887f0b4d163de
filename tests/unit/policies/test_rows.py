"""Which samples share a row of the learner, and where a row ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.learning.rows import BLOCK, halves, num_tokens, plan_rows

PAIRS = 384
ANY = 10**9
"""Enough tokens, or pairs, for whatever is shared here."""


def samples_of(plan: Sequence[Sequence[Any]]) -> list[list[int]]:
    return [[branch.sample for branch in row] for row in plan]


def test_samples_with_a_common_beginning_share_a_row() -> None:
    first, second = [1] * 100, [2] * 100
    rows = plan_rows([[*first, 7], [*second, 8], [*first, 5], [*first, 5, 6], [3, 1]], 1000, PAIRS)
    assert samples_of(rows) == [[2, 3, 0], [1], [4]]
    assert [num_tokens(row) for row in rows] == [103, 101, 2]
    assert samples_of(plan_rows([first, first], 1000, pairs=0)) == [[0], [1]]


def test_row_ends_where_it_would_cost_more_than_two() -> None:
    def answers(length: int, number: int) -> list[list[int]]:
        return [[1] * 300 + [token] * length for token in range(2, 2 + number)]

    assert samples_of(plan_rows(answers(50, 4), 400, PAIRS)) == [[0, 1], [2, 3]]
    long = PAIRS * 300 // BLOCK
    assert long > BLOCK
    assert samples_of(plan_rows(answers(long, 2), 10_000, PAIRS)) == [[0, 1]]
    assert samples_of(plan_rows(answers(long + 1, 2), 10_000, PAIRS)) == [[0], [1]]


def test_halves_of_a_row_are_cut_where_the_tree_is_thin() -> None:
    sequences = [[1, 1, 2, 2, 2, 2, end] for end in range(4)] + [[1, 3, 3, 3, 3, end] for end in range(4)]
    (row,) = plan_rows(sequences, ANY, ANY)
    parts = halves(row)
    assert samples_of(parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [num_tokens(part) for part in parts] == [10, 9]


def leaves(prompt: int, turn: int, levels: int) -> list[list[int]]:
    """Token ids of the leaves of a tree with a fan-out of 2, in any order."""
    rng = random.Random(0)
    paths = [[0] * prompt]
    for _ in range(levels):
        paths = [path + [rng.randrange(1, 1000) for _ in range(turn)] for path in paths for _ in range(2)]
    rng.shuffle(paths)
    return paths


def test_tree_of_two_rows_is_cut_where_they_have_least_in_common() -> None:
    rows = plan_rows(leaves(300, 60, 4), 2048, 1728)
    assert [num_tokens(row) for row in rows] == [1200, 1200], "2,100 are unique"


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(6, 20),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_rows_cost_as_little_as_any_division(ids: list[list[int]], most: int, pairs: int) -> None:
    order = sorted(range(len(ids)), key=lambda index: ids[index])

    def cost(row: Sequence[int]) -> float:
        size, off_path = len(ids[row[0]]), 0
        for one, other in pairwise(row):
            same = [a == b for a, b in zip(ids[one], ids[other], strict=False)]
            shared = same.index(False) if False in same else len(same)
            if not shared:
                return float("inf")
            off_path += min(size - shared, BLOCK) * (len(ids[other]) - shared)
            size += len(ids[other]) - shared
        return size + off_path / pairs if size <= most else float("inf")

    def least(rest: Sequence[int]) -> float:
        ends = range(1, len(rest) + 1)
        return min((cost(rest[:end]) + least(rest[end:]) for end in ends), default=0.0)

    rows = samples_of(plan_rows(ids, most, pairs))
    assert sum(map(cost, rows)) <= least(order) + 1e-9
