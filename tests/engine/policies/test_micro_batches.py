"""Micro-batches are bounded by their padded size, and waste little of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import pytest

from policies.learning.rows import Branch, Row
from policies.learning.verl.micro_batches import divide, divide_further, fill

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def padded(lengths: list[int], groups: list[list[int]]) -> list[int]:
    return [len(group) * max(lengths[row] for row in group) for group in groups]


@pytest.mark.parametrize("max_tokens", [1000, 1500, 16384])
def test_long_row_among_short_ones_costs_little_more(max_tokens: int) -> None:
    lengths = [48] * 40 + [1000] + [48] * 23
    groups = divide(lengths, max_tokens)
    assert sorted(chain(*groups)) == list(range(64))
    assert max(padded(lengths, groups)) <= max_tokens
    assert sum(padded(lengths, groups)) <= 1.01 * sum(lengths)


def test_lengths_of_wide_spread_are_padded_by_less_than_a_tenth() -> None:
    rng = random.Random(0)
    for _ in range(20):
        lengths = [min(4000, max(8, int(rng.lognormvariate(5.5, 1.0)))) for _ in range(64)]
        groups = divide(lengths, 16384)
        assert sorted(chain(*groups)) == list(range(64))
        assert max(padded(lengths, groups)) <= 16384
        assert sum(padded(lengths, groups)) < 1.1 * sum(lengths)


def test_rows_of_one_length_are_one_batch_in_their_order() -> None:
    assert divide([50] * 8, 400) == [list(range(8))]
    assert divide([50, 49, 50, 48], 400) == [[0, 1, 2, 3]]


def test_row_as_long_as_the_bound_stands_alone() -> None:
    assert divide([10, 400, 10], 400) == [[1], [0, 2]]


def test_packed_rows_fill_what_the_bound_allows() -> None:
    rng = random.Random(0)
    for _ in range(20):
        lengths = [min(4000, max(8, int(rng.lognormvariate(5.5, 1.0)))) for _ in range(64)]
        groups = fill(lengths, 4096)
        assert sorted(chain(*groups)) == list(range(64))
        sums = [sum(lengths[row] for row in group) for group in groups]
        assert max(sums) <= 4096 and sum(sums[:-1]) > 0.9 * 4096 * (len(sums) - 1)
    assert fill([5, 5, 5], 10) == [[0, 1], [2]]


def group(*rows: Sequence[int]) -> list[Row]:
    """A micro-batch of samples that share 8 tokens within their row and have 2 of their own."""
    return [[Branch(sample, 8, 2) for sample in row] for row in rows]


def test_groups_are_halved_until_all_ranks_have_as_many() -> None:
    groups = divide_further([group([0], [1], [2], [3], [4]), group([5])], 4)
    assert groups == [group([0], [1]), group([2]), group([3], [4]), group([5])]
    assert divide_further([group([0]), group([1])], 2) == [group([0]), group([1])]


def test_samples_of_one_row_are_parted_for_other_ranks() -> None:
    assert divide_further([group([0, 1, 2, 3])], 3) == [group([0]), group([1]), group([2, 3])]
