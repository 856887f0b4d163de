"""What a rank of the learner gets of a mini-batch, and how often."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from learner_samples import ragged_samples, with_random_columns

from actors.learning import ranks as rank_actors
from actors.learning.learner_calls import PolicyCalls
from actors.learning.ranks import RankGroup, RankWorker
from policies.learning.division import OLD_LOGPROBS, POLICY_COLUMNS, Division, RankShard
from policies.learning.samples import TrainBatch
from policies.learning.settings import LearnerConfig

COLUMNS = [*POLICY_COLUMNS, *OLD_LOGPROBS]
PAIRS, MOST = 384, 1 << 14


def sizes(batch: TrainBatch, num_ranks: int) -> list[tuple[int, int]]:
    """Bytes that each rank gets once, and those of an update."""
    division = Division([batch], num_ranks, MOST, PAIRS)
    return [
        (len(pickle.dumps(division.ids(rank))), len(pickle.dumps(division.shards([batch], COLUMNS)[rank])))
        for rank in range(num_ranks)
    ]


def test_bytes_of_a_rank_are_its_share_of_the_batch() -> None:
    batch = TrainBatch(samples=with_random_columns(ragged_samples(64, most=400)))
    [whole] = sizes(batch, 1)
    for num_ranks in (2, 4, 8):
        for own in sizes(batch, num_ranks):
            for part, all_of_it in zip(own, whole, strict=True):
                assert 0.85 < part * num_ranks / all_of_it < 1.25


def test_shards_hold_what_was_divided_each_sample_once() -> None:
    batch = TrainBatch(samples=with_random_columns(ragged_samples(9)), temperature=0.7)
    division = Division([batch], 2, 1000, PAIRS)
    found = {}
    for rank in range(2):
        [shard] = pickle.loads(pickle.dumps(division.shards([batch], COLUMNS)[rank]))
        whole = shard.with_ids(pickle.loads(pickle.dumps(division.ids(rank))))
        assert (whole.temperature, whole.num_trajectories, whole.is_scored) == (0.7, 9, True)
        found |= {each.sample_id: each for each in whole.samples}
    for sample in batch.samples:
        for name in ("prompt_ids", "response_ids", "loss_mask", *COLUMNS):
            assert getattr(found[sample.sample_id], name) == getattr(sample, name)
        assert found[sample.sample_id].values == ()


class Rank:
    """A stand-in for the actor of a rank, which counts what it takes from the object store."""

    def __init__(self) -> None:
        self.worker = ScoringRank(None)
        self.worker._model = ScoringModel()  # type: ignore[assignment]
        self.work_on = SimpleNamespace(remote=self.worker.work_on)


class ScoringModel:
    """Finds the same for each token, and notes the ids of what it gets."""

    def __init__(self) -> None:
        self.ids: list[tuple[int, ...]] = []

    def score(self, shards: Sequence[RankShard]) -> Any:
        return [{"old_logprobs": [[1.0] * len(each.loss_mask) for each in shard.samples]} for shard in shards]

    def update(self, shards: Sequence[RankShard]) -> Any:
        self.ids += [each.response_ids for shard in shards for each in shard.samples]
        return None


class ScoringRank(RankWorker):
    def work(self, method: str, *args: Any) -> Any:
        return getattr(self._model, method)(*args)

    def _load(self, **_: Any) -> Any:
        return None


def test_ids_reach_each_rank_once_for_score_and_update(monkeypatch: pytest.MonkeyPatch) -> None:
    store: list[Any] = []
    taken: list[int] = []

    def put(value: Any) -> int:
        store.append(pickle.dumps(value))
        return len(store) - 1

    def get(reference: Any, timeout: float | None = None) -> Any:
        if not isinstance(reference, int):
            return reference  # the results of stand-ins
        taken.append(reference)
        return pickle.loads(store[reference])

    monkeypatch.setattr(rank_actors.ray, "put", put)
    monkeypatch.setattr(rank_actors.ray, "get", get)
    monkeypatch.setattr(RankGroup, "_start", lambda group: None)
    settings = LearnerConfig(num_workers=2)
    group = RankGroup(ScoringRank, SimpleNamespace(), settings, learner=settings)  # type: ignore[arg-type]
    group._ranks, group._opened = [Rank(), Rank()], [PAIRS, PAIRS]  # type: ignore[assignment, list-item]
    batches = [TrainBatch(samples=ragged_samples(6, seed)) for seed in range(2)]
    scored = group.begin_scoring(PolicyCalls.score, batches, keeps=True)(batches)
    assert [each.old_logprobs for each in scored[0].samples] == [
        (1.0,) * len(each.response_ids) for each in batches[0].samples
    ]
    group.begin_scoring(PolicyCalls.score, [TrainBatch(samples=ragged_samples(3, 7))], keeps=False)
    assert len(taken) == 4, "another batch in between"
    group.begin_learning(PolicyCalls.update, [*scored, scored[0]], COLUMNS)()
    assert (len(store), len(taken)) == (4, 4)
    learned = [ids for rank in group._ranks for ids in rank.worker._model.ids]
    expected = [each.response_ids for batch in (*batches, batches[0]) for each in batch.samples]
    assert sorted(learned) == sorted(expected)
    group.begin_learning(PolicyCalls.update, scored, COLUMNS)()
    assert len(taken) == 6, "ids are kept for one update"
