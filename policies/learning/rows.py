"""Rows of the learner: which samples are computed together, as a tree of their tokens.

``verl/token_trees.py`` draws such a row, and computes it. Importing this is light: the driver plans the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

BLOCK = 256
"""Tokens of a row whose attention is computed together: of 64 to 512 the fastest for most loads on a CPU."""


class Branch(NamedTuple):
    """A sample in its row.

    Attributes:
        sample: index of the sample.
        shared: number of its first tokens that the sample before it in the order of ids has too. They stand
            in the row already, but for the first sample of a row.
        own: number of its other tokens.
    """

    sample: int
    shared: int
    own: int


Row = list[Branch]


def plan_rows(sequences: Iterable[Sequence[int]], most: int, pairs: int) -> list[Row]:
    """Return which samples make up each row, in the order of each row's first sample.

    Of all divisions of the samples in the order of their ids it is the one that costs least: its tokens, of
    which those that two rows have in common count twice, and one for each ``pairs`` of tokens off every path.

    Args:
        sequences: token ids of each sample.
        most: tokens of a row, and of each sample.
        pairs: that ``pairs_per_token`` returns.
    """
    if not pairs:
        return [[Branch(index, 0, len(ids))] for index, ids in enumerate(sequences)]
    ids = [np.asarray(each, dtype=">u4") for each in sequences]  # whose bytes sort as the ids do
    order = sorted(range(len(ids)), key=lambda index: ids[index].tobytes())
    common = [0, *(_num_common(ids[one], ids[other]) for one, other in pairwise(order))]
    branches = [
        Branch(index, shared, len(ids[index]) - shared) for index, shared in zip(order, common, strict=True)
    ]
    rows: list[Row] = []
    end, begins = len(branches), _cheapest_begins(branches, most, pairs)
    while end:
        rows.append(branches[begins[end] : end])
        end = begins[end]
    return sorted(rows, key=lambda row: min(branch.sample for branch in row))


def _cheapest_begins(branches: Sequence[Branch], most: int, pairs: int) -> list[int]:
    """Beginning of the last of the rows that are cheapest, by the number of first branches."""
    cost = np.zeros(len(branches) + 1)  # of the branches before this one
    begins = [0] * (len(branches) + 1)
    # Of the row from each branch on: its tokens, and its pairs off every path.
    size, off_path = np.zeros(len(branches), dtype=int), np.zeros(len(branches))
    first = 0  # from where on a row may begin
    for end, (_, shared, own) in enumerate(branches):
        if not shared:
            first = end
        off_path[first:end] += np.minimum(size[first:end] - shared, BLOCK) * own
        size[first:end] += own
        size[end] = shared + own
        first += int((size[first : end + 1] > most).sum())
        costs = (cost[:-1] + size + off_path / pairs)[first : end + 1]
        begins[end + 1] = first + int(costs.argmin())
        cost[end + 1] = costs.min()
    return begins


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal tokens at the beginning."""
    least = min(len(first), len(second))
    differs = first[:least] != second[:least]
    return int(differs.argmax()) if differs.any() else least


def num_tokens(row: Sequence[Branch]) -> int:
    """Number of tokens of a row, each counted once."""
    return row[0].shared + sum(branch.own for branch in row)


def halves(row: Row) -> tuple[Row, Row]:
    """A row of several samples as two, cut where the larger one is smallest."""
    own = list(accumulate((branch.own for branch in row), initial=0))

    def larger(at: int) -> int:
        return max(row[0].shared + own[at], row[at].shared + own[-1] - own[at])

    at = min(range(1, len(row)), key=larger)
    return row[:at], row[at:]
