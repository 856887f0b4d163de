"""A rank of a learner without an actor, for whole mini-batches, as ``LearnerGroup`` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.learning.division import (
    ADVANTAGES,
    OLD_LOGPROBS,
    VALUE_COLUMNS,
    Columns,
    Division,
    RankShard,
    policy_columns,
)
from policies.learning.samples import TrainBatch


def shards(
    batch: TrainBatch, num_ranks: int, max_tokens: int, pairs: int, columns: Sequence[str] = ()
) -> list[RankShard]:
    """The shards of all ranks, whole, with these columns."""
    division = Division([batch], num_ranks, max_tokens, pairs)
    made = enumerate(division.shards([batch], columns))
    return [own.with_ids(division.ids(rank)) for rank, [own] in made]


class WholeBatches:
    """A ``VerlLearner`` or ``VerlCritic`` that divides what it is given among all ranks, and joins
    what they find. All else is the rank's own.
    """

    def __init__(self, rank: Any) -> None:
        self._whole = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def fit(self, batches: Sequence[TrainBatch]) -> Any:
        return self._whole.fit(self._divided(batches)[1])

    def fit_weighted(self, batch: TrainBatch) -> Any:
        return self._whole.fit_weighted(self._divided([batch], ADVANTAGES)[1])

    def update(self, batches: Sequence[TrainBatch]) -> Any:
        algorithm = getattr(self._whole, "_algorithm", None)
        of_policy = {} if algorithm is None else policy_columns(algorithm) | OLD_LOGPROBS
        return self._whole.update(self._divided(batches, of_policy or VALUE_COLUMNS)[1] if batches else [])

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        if self._whole._algorithm.bypass:
            batches = [each.with_engine_logprobs() for each in batches]
        return self._with_columns(self._whole.score, batches)

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        [scored] = self._with_columns(self._whole.logprobs, [batch])
        return [list(each.old_logprobs) for each in scored.samples]

    def values(self, batches: Sequence[TrainBatch]) -> list[list[tuple[float, ...]]]:
        scored = self._with_columns(self._whole.values, batches)
        return [[each.values for each in batch.samples] for batch in scored]

    def _with_columns(self, score: Any, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        import torch.distributed as dist

        division, own = self._divided(batches)
        found: list[list[Columns]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, score(own))
        return division.with_columns(batches, found[:: self._whole._learner.ranks_of_row])

    def _divided(
        self, batches: Sequence[TrainBatch], columns: Sequence[str] | dict[str, str] = ()
    ) -> tuple[Division, list[RankShard]]:
        import torch.distributed as dist

        learner = self._whole._learner
        group, num_groups = (
            each // learner.ranks_of_row for each in (dist.get_rank(), dist.get_world_size())
        )
        division = Division(batches, num_groups, learner.row_tokens, self.pairs_per_token)
        ids = division.ids(group)
        return division, [each.with_ids(ids) for each in division.shards(batches, [*columns])[group]]
