"""Rows of the learner: which samples are computed together, as a tree of their tokens.

``verl/token_trees.py`` draws such a row, and computes it. Importing this is light: the driver plans the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
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

    Args:
        sequences: token ids of each sample.
        most: tokens of a row, and of each sample.
        pairs: that ``pairs_per_token`` returns.
    """
    if not pairs:
        return [[Branch(index, 0, len(ids))] for index, ids in enumerate(sequences)]
    ids = [np.asarray(each, dtype=">u4") for each in sequences]  # whose bytes sort as the ids do
    order = sorted(range(len(ids)), key=lambda index: ids[index].tobytes())
    rows: list[Row] = []
    before, size = ids[order[0]][:0], 0
    for index in order:
        shared = _num_common(before, ids[index])
        before, own = ids[index], len(ids[index]) - shared
        num_off_path = min(size - shared, BLOCK) * own
        if shared and size + own <= most and num_off_path <= pairs * shared:
            rows[-1].append(Branch(index, shared, own))
            size += own
        else:
            rows.append([Branch(index, shared, own)])
            size = shared + own
    return sorted(rows, key=lambda row: min(branch.sample for branch in row))


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
