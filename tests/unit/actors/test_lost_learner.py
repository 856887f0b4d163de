"""A rank that is killed or stopped ends the calls of the learner with an error of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_samples import batches

from actors.learning import worker_group
from actors.learning.call_timeouts import CallTimeouts
from actors.learning.rank_worker import RankWorker
from actors.weights.store import PublishedWeights
from environments.errors import LearnerLostError
from launch.health.members import members
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

RISING = OptimizerConfig(lr=1e-3, warmup_steps=10)


def ranks() -> set[int]:
    return {member.pid for member in members(below=os.getpid()) if member.role == "learner"}


@pytest.fixture
def learner(ray_cluster: None, tiny_model: Path) -> Iterator[tuple[Any, list[int]]]:
    """A learner of one rank that has answered once, and the rank's process."""
    from actors.learning.learner_group import LearnerGroup
    from actors.weights.store import WeightStore

    before = ranks()
    algorithm, store = resolve(AlgorithmConfig(), 64), WeightStore.remote()
    group = LearnerGroup(str(tiny_model), LearnerConfig(), algorithm, 100, 0, store)
    group.check_ranks()
    yield group, sorted(ranks() - before)
    group.close()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "did not answer for 2 s")]
)
def test_a_killed_and_a_stopped_rank_are_noticed_and_replaced_with_the_published_weights(
    learner: tuple[Any, list[int]], number: signal.Signals, text: str, tmp_path: Path
) -> None:
    group, (rank,) = learner
    group.begin_phase(RISING, 100)
    group.update(group.score(batches(1)))
    group.save(str(tmp_path))
    group.update(group.score(batches(1)))
    group.publish(7)
    published = group.logprobs(batches(1)[0])
    group._policy._timeouts = CallTimeouts(
        2
    )  # only now: until it is rebuilt, and not for what has to succeed
    os.kill(rank, number)
    with pytest.raises(LearnerLostError, match=text):
        group.score(batches(1))

    assert group.rebuild(RISING, 100, str(tmp_path)) == 7
    assert group.logprobs(batches(1)[0]) == published, "not those of the checkpoint"
    metrics = group.update(group.score(batches(1))).metrics
    assert metrics["learn/lr"] == pytest.approx(3e-4), "the third step's"


@pytest.mark.engine
def test_before_its_first_publish_a_phase_goes_on_with_the_rate_of_its_checkpoint(
    learner: tuple[Any, list[int]], tmp_path: Path
) -> None:
    group, (rank,) = learner
    group.begin_phase(RISING, 100)
    group.save(str(tmp_path / "unpublished"))
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(LearnerLostError, match="has died"):
        group.score(batches(1))
    assert group.rebuild(RISING, 100, str(tmp_path / "unpublished")) is None

    group.publish(3)
    later = OptimizerConfig(lr=1e-5)
    group.begin_phase(later, 100)
    group.save(str(tmp_path / "later"))
    assert group.rebuild(later, 100, str(tmp_path / "later")) == 3
    metrics = group.update(group.score(batches(1))).metrics
    assert metrics["learn/lr"] == pytest.approx(1e-5), "that of the phase before was 1e-3"


def test_weights_that_are_published_in_another_form_rebuild_no_learner(verl_on_cpu: None) -> None:
    """Experts are published one by one, and held as one: the run goes on from its checkpoint, as it would
    where the learner was lost for another reason.
    """
    from actors.learning.publishing_learner import FetchedWeights
    from policies.engines.weights import pack
    from policies.learning.verl.weights import fill

    experts = torch.rand(2, 3, 4)
    fetched = FetchedWeights()
    published = [("norm.weight", torch.ones(3)), *((f"experts.{i}.weight", experts[i]) for i in range(2))]
    asyncio.run(fetched.load_weights(7, list(pack(published))))
    held = {"norm.weight": torch.zeros(3)}
    fill(held, fetched.whole)
    assert held["norm.weight"].tolist() == [1, 1, 1]
    with pytest.raises(LearnerLostError, match=r"lack 'experts\.weight': they make no learner"):
        fill({"experts.weight": torch.zeros(2, 3, 4)}, fetched.whole)


class Ranks:
    """Stand-ins for the ranks: the schedule is where the last publish was."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start_anew(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None: ...

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        return (f"place {args[0]}", {"last_epoch": args[0]}) if method == "publish_weights" else None


class StoreOfOneVersion:
    """Takes the first version; a rank dies while it takes the second."""

    def __init__(self) -> None:
        self.published: PublishedWeights | None = None
        self.publish, self.newest = SimpleNamespace(remote=self._take), SimpleNamespace(remote=self._tell)

    def _take(self, version: int, location: str) -> None:
        if self.published is not None:
            raise LearnerLostError("A learner rank has died.")
        self.published = PublishedWeights(version, location)

    def _tell(self) -> PublishedWeights | None:
        return self.published


def test_a_place_that_no_node_has_any_more_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_group.WorkerGroup, "_start", lambda group: None)
    places: Any = SimpleNamespace(wait=lambda seconds: False)
    group = worker_group.WorkerGroup(RankWorker, places, LearnerConfig(), learner=LearnerConfig())
    group._ranks = []
    with pytest.raises(LearnerLostError, match="lost with its node, and no other has room"):
        group.start_anew(LearnerConfig().optimizer, 10)


def test_places_are_given_back_where_ctrl_c_ends_the_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    given_back: list[Any] = []
    places = SimpleNamespace(ready=interrupted)
    monkeypatch.setattr(worker_group, "placement_group", lambda *_, **__: places)
    monkeypatch.setattr(worker_group.ray.util, "remove_placement_group", given_back.append)
    with pytest.raises(KeyboardInterrupt):
        worker_group.create_placement_group(LearnerConfig())
    assert given_back == [places]


def test_a_publish_that_fails_leaves_the_schedule_of_the_version_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a learner that goes on from those weights would be a step ahead in its learning rate."""
    from actors.learning import learner_group

    monkeypatch.setattr(learner_group.ray, "get", lambda answer: answer)
    ranks: Any = Ranks()
    group = learner_group.LearnerGroup.__new__(learner_group.LearnerGroup)
    group._policy, group._critic, group._store, group._schedule = ranks, None, StoreOfOneVersion(), {}
    group.publish(1)
    with pytest.raises(LearnerLostError):
        group.publish(2)
    assert group.rebuild(RISING, 100, "checkpoint") == 1
    assert ranks.calls[-1] == ("take_over", PublishedWeights(1, "place 1"), {"last_epoch": 1})
