"""Division of mini-batches among the ranks of a learner: each gets its own samples, and their ids once.

The driver divides, by lengths and by what samples share, and sends

    ids       prompts and responses of a rank's samples, as parts of one tree: once for all calls
    shard     masks, and the columns that one call reads: a ``RankShard``, which ``with_ids`` completes

and ``with_columns`` puts in order what the ranks return for their samples. Importing this is light.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from environments.columns import floats, stored
from environments.errors import LearnerError
from environments.prefix_tree import PrefixTree, Span
from policies.learning.rows import Branch, Row, halves, num_tokens, plan_rows
from policies.learning.samples import FLOATS, TrainBatch, TrainingSample, padding_sample

if TYPE_CHECKING:
    from policies.learning.algorithm import Algorithm

Ids = list[tuple[Span, Span, tuple[str, ...]]]
"""Prompt and response of each sample of a shard, and the pictures in them."""
Columns: TypeAlias = "dict[str, list[array[float]]]"
"""Columns by name, each with a row for every sample of a shard."""
ADVANTAGES = {"advantages": "advantages"}
"""Column of a sample whose tokens have weights."""
POLICY_COLUMNS = {"rollout_logprobs": "rollout_log_probs", **ADVANTAGES}
"""Our columns of a sample, and what verl's policy losses call them."""
OLD_LOGPROBS = {"old_logprobs": "old_log_probs"}
"""Column of a sample that was scored."""
VALUE_COLUMNS = {"values": "values", "returns": "returns"}
"""Our columns of a sample, and what verl's value loss calls them."""
IMBALANCE = 1.05
"""The rank with the most work may have this many times the mean of all."""
NO_IDS = PrefixTree().root
UNSENT: dict[str, Any] = dict.fromkeys(FLOATS, floats(())) | {"turns": array("i")}
"""Columns that a call does not read."""


def policy_columns(algorithm: Algorithm) -> dict[str, str]:
    """Columns that the policy learns from, but for those of ``OLD_LOGPROBS``."""
    in_loss = algorithm.kl_place == "loss"
    return POLICY_COLUMNS | ({"reference_logprobs": "ref_log_prob"} if in_loss else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShard:
    """A rank's rows of a mini-batch.

    A row is a sample, or a tree of several. All ranks have equally many; where they do not come out even,
    some are padding, which trains nothing.
    """

    place: int
    """Index of its ids among all that the rank has got."""
    rows: list[Row]
    samples: list[TrainingSample]
    """Samples of the rows, one row after the other."""
    trajectory_shares: list[float]
    """The part that each sample has of its trajectory's sampled tokens."""
    num_trajectories: int
    """Number of those, of the whole mini-batch, of which any token is trained."""
    is_scored: bool
    """True if the mini-batch has old log-probabilities."""
    has_pictures: bool
    """True if the mini-batch has pictures, of whichever rank."""
    temperature: float

    def with_ids(self, ids: Sequence[Ids]) -> RankShard:
        """The shard with its ids, of all that ``Division.ids`` has made for its rank."""
        pairs = zip(self.samples, ids[self.place], strict=True)
        samples = [
            each.replaced(prompt_ids=prompt, response_ids=rest, pictures=pictures)
            for each, (prompt, rest, pictures) in pairs
        ]
        return replace(self, samples=samples)


class Division:
    """Rows of some mini-batches, by rank.

    They are filled up with padding until every rank has equally many; then the ranks' work is made as equal
    as it gets. Rows with the same prompt stand next to each other; but for that a rank's order is the
    mini-batch's.

    Args:
        batches: not empty; one that comes several times counts once.
        num_ranks: those that compute a row together count once, here and in all that follows.
        max_tokens: most tokens that fit through the model at once.
        pairs_per_token: that ``token_trees.pairs_per_token`` returns.

    Raises:
        LearnerError: a sample is longer than ``max_tokens``.
    """

    def __init__(
        self, batches: Sequence[TrainBatch], num_ranks: int, max_tokens: int, pairs_per_token: int
    ) -> None:
        self._batches = {_key(batch): batch for batch in batches}
        self._rows = [
            _rows_of_ranks(batch, num_ranks, max_tokens, pairs_per_token) for batch in self._batches.values()
        ]
        self._places = {key: place for place, key in enumerate(self._batches)}

    def has(self, batches: Sequence[TrainBatch]) -> bool:
        """Return whether it divides all of these, whatever columns they have got meanwhile."""
        return all(_key(batch) in self._places for batch in batches)

    def ids(self, rank: int) -> list[Ids]:
        """The ids of the samples that ``rank`` has of each mini-batch, in a tree of their own."""
        found = []
        for batch, rows in zip(self._batches.values(), self._rows, strict=True):
            root = PrefixTree().root
            ids: Ids = []
            for sample in _samples(batch, rows[rank]):
                whole, size = root.extended(_tokens(sample)), sample.num_prompt_tokens
                ids.append((whole.part(0, size), whole.part(size, whole.stop), sample.pictures))
            found.append(ids)
        return found

    def shards(self, batches: Sequence[TrainBatch], columns: Sequence[str]) -> list[list[RankShard]]:
        """The shards of each rank with these columns, and without their ids."""
        distinct = {id(each): each for each in batches}  # one that comes several times is pickled once
        made = {name: self._shards(each, columns) for name, each in distinct.items()}
        return [list(own) for own in zip(*(made[id(each)] for each in batches), strict=True)]

    def _shards(self, batch: TrainBatch, columns: Sequence[str]) -> list[RankShard]:
        place, sizes = self._places[_key(batch)], Counter[str]()
        for sample in batch.samples:
            sizes[_trajectory(sample)] += sample.num_sampled_tokens
        is_scored = any(
            len(stored(each, "old_logprobs")) for each in batch.samples if each.num_sampled_tokens
        )
        shards = []
        for rows in self._rows[place]:
            samples = _samples(batch, rows)
            shares = [
                each.num_sampled_tokens / sizes[_trajectory(each)] if each.num_sampled_tokens else 1.0
                for each in samples
            ]
            shards.append(
                RankShard(
                    place=place,
                    rows=rows,
                    samples=[_sent(sample, columns) for sample in samples],
                    trajectory_shares=shares,
                    num_trajectories=sum(1 for size in sizes.values() if size),
                    is_scored=is_scored,
                    has_pictures=any(each.pictures for each in batch.samples),
                    temperature=batch.temperature,
                )
            )
        return shards

    def with_columns(
        self, batches: Sequence[TrainBatch], results: Sequence[Sequence[Columns]]
    ) -> list[TrainBatch]:
        """The mini-batches with the columns that the ranks have found.

        Args:
            results: of each rank, columns of each of its shards.
        """
        filled = []
        for batch, of_ranks in zip(batches, zip(*results, strict=True), strict=True):
            indices = [
                branch.sample
                for rows in self._rows[self._places[_key(batch)]]
                for row in rows
                for branch in row
            ]
            for name in of_ranks[0]:
                found = zip(indices, chain(*(columns[name] for columns in of_ranks)), strict=True)
                by_index = dict(found)  # padding has the index behind the last
                batch = batch.with_column(name, [by_index[index] for index in range(len(batch.samples))])
            filled.append(batch)
        return filled


def _key(batch: TrainBatch) -> Hashable:
    """Identity of the ids of a mini-batch: its columns may change."""
    return tuple((stored(each, "prompt_ids"), stored(each, "response_ids")) for each in batch.samples)


def _trajectory(sample: TrainingSample) -> str:
    return sample.rollout_id or sample.sample_id


def _tokens(sample: TrainingSample) -> array[int]:
    tokens: array[int] = stored(sample, "prompt_ids").read() + stored(sample, "response_ids").read()
    return tokens


def _samples(batch: TrainBatch, rows: Sequence[Row]) -> list[TrainingSample]:
    samples = (*batch.samples, _padding(batch))
    return [samples[branch.sample] for row in rows for branch in row]


def _padding(batch: TrainBatch) -> TrainingSample:
    return padding_sample(_tokens(batch.samples[0])[0])


def _sent(sample: TrainingSample, columns: Sequence[str]) -> TrainingSample:
    """A sample with its mask and these columns alone."""
    sent = {name: stored(sample, name) for name in columns}
    return sample.replaced(prompt_ids=NO_IDS, response_ids=NO_IDS, pictures=(), **UNSENT | sent)


# -- balance -------------------------------------------------------------------------------------------


def _rows_of_ranks(
    batch: TrainBatch, num_ranks: int, max_tokens: int, pairs_per_token: int
) -> list[list[Row]]:
    longest = max(batch.samples, key=len)
    if len(longest) > max_tokens:
        raise LearnerError(
            f"Sample {longest.sample_id!r} has {len(longest)} tokens, but learner.micro_batch_tokens lets "
            f"{max_tokens} through the model at once: raise it."
        )
    if any(sample.pictures for sample in batch.samples):
        pairs_per_token = 0  # equal ids may be those of different pictures
    rows = plan_rows(map(_tokens, batch.samples), max_tokens, pairs_per_token)
    padding = Branch(len(batch.samples), 0, len(_padding(batch)))
    return [_by_prompt(batch, rows_of_rank) for rows_of_rank in divide_among_ranks(rows, num_ranks, padding)]


def _by_prompt(batch: TrainBatch, rows: Sequence[Row]) -> list[Row]:
    found: dict[bytes, list[Row]] = {}
    firsts = _samples(batch, [row[:1] for row in rows])
    for row, first in zip(rows, firsts, strict=True):
        found.setdefault(stored(first, "prompt_ids").read().tobytes(), []).append(row)
    return list(chain(*found.values()))


def divide_among_ranks(rows: Sequence[Row], num_ranks: int, padding: Branch) -> list[list[Row]]:
    """The rows of each rank, as many as every other's with those of ``padding``.

    As long as the rank with the most work has more than ``IMBALANCE`` times the mean, its largest tree is
    halved, if that leaves less to the slowest ones: what the halves have in common is computed on two ranks.
    """
    parts = _partition(rows, num_ranks, padding)
    while trees := _trees_that_delay(parts):
        largest = max(trees, key=num_tokens)
        rows = list(chain(*(halves(row) if row is largest else (row,) for row in rows)))
        halved = _partition(rows, num_ranks, padding)
        if _slowest_first(halved) >= _slowest_first(parts):
            break
        parts = halved
    return parts


def _partition(rows: Sequence[Row], num_ranks: int, padding: Branch) -> list[list[Row]]:
    filled = [*rows, *([[padding]] * (-len(rows) % num_ranks))]
    parts = balanced([_work([row]) for row in filled], num_ranks)
    return [[filled[index] for index in part] for part in parts]


class _Parts(list[tuple[int, list[tuple[int, int]]]]):
    """Sums and items of disjoint parts, the largest sum first; the least of all are those farthest apart."""

    def __lt__(self, other: Any) -> bool:
        return (self[0][0] - self[-1][0], self[0]) > (other[0][0] - other[-1][0], other[0])


def balanced(work: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide items into parts of equally many, whose sums of ``work`` are nearly equal; return their indices.

    Source: the largest differencing method of Karmarkar and Karp (1982), as verl has it in
    ``seqlen_balancing``, whose partitions these are.

    Args:
        work: of each item; a multiple of ``num_parts`` of them.
    """
    items = sorted((amount, index) for index, amount in enumerate(work))
    heap = [
        _Parts((amount, [(index, amount)]) for amount, index in reversed(items[start : start + num_parts]))
        for start in range(0, len(items), num_parts)
    ]
    heapify(heap)
    while len(heap) > 1:
        pairs = zip(heappop(heap), reversed(heappop(heap)), strict=True)
        heappush(
            heap, _Parts(sorted(((one + two, own + more) for (one, own), (two, more) in pairs), reverse=True))
        )
    return [sorted(index for index, _ in part) for _, part in heap[0]]


def _work(rows: Sequence[Row]) -> int:
    """Work of a model for some rows, as verl estimates it for 7 billion weights, in tokens of 24,576."""
    return sum(24576 * size + size**2 for size in map(num_tokens, rows))


def _slowest_first(parts: Sequence[Sequence[Row]]) -> list[int]:
    return sorted(map(_work, parts), reverse=True)


def _trees_that_delay(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the trees of the part with the most work, if the others wait for it."""
    work = list(map(_work, parts))
    slowest = max(range(len(parts)), key=lambda index: work[index])
    waits = work[slowest] * len(parts) > IMBALANCE * sum(work)
    return [row for row in parts[slowest] if len(row) > 1 and waits]
