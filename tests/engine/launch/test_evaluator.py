"""An evaluation measures one version, whatever is published meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray

from actors.rollouts.rollout import RolloutRequest
from environments import Dataset
from environments.types import Trajectory, TrajectoryGroup
from launch.settings.tree import TrainConfig
from launch.training.evaluator import Evaluator, evaluation_server

TASKS = Dataset([{"question": str(index)} for index in range(3)])


class FakeService:
    """Plays what is ordered once ``free`` is set; it is its own stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self.stream = self
        self.free = threading.Event()
        self.requests: list[RolloutRequest] = []
        self._error = error

    def wait_until_up(self) -> None:
        if self._error:
            raise self._error

    def groups(self, requests: Sequence[RolloutRequest]) -> Iterator[TrajectoryGroup]:
        self.requests += requests
        assert self.free.wait(120)
        for request in reversed(requests):
            trajectory = Trajectory(task=request.task, rollout_id=request.rollout_id)
            yield TrajectoryGroup(group_id=request.group_id, task=request.task, trajectories=(trajectory,))


@pytest.fixture
def stores(ray_cluster: None) -> tuple[Any, Any]:
    from actors.weights.store import WeightStore

    return WeightStore.remote(), WeightStore.remote()


def test_evaluation_between_updates_is_finished_once_begun() -> None:
    service = FakeService()
    service.free.set()
    evaluator = Evaluator(TrainConfig(), {"": TASKS}, service, {}, None)
    evaluator.begin(step=4, version=5)
    evaluation = evaluator.collect(wait=False)
    assert evaluation is not None and evaluation.step == 4
    assert [group.task for group in evaluation.groups] == list(TASKS)
    assert {request.min_version for request in service.requests} == {5}
    assert evaluator.collect(wait=True) is None, "an evaluation is reported once"


def test_during_updates_the_version_that_is_measured_stays(stores: tuple[Any, Any]) -> None:
    newest, pinned = stores
    service = FakeService()
    evaluator = Evaluator(TrainConfig(), {"": TASKS}, service, {"": newest}, {"": pinned})
    ray.get(newest.publish.remote(5, [ray.put("weights of version 5")]))
    evaluator.begin(step=4, version=5)
    ray.get(newest.publish.remote(6, [ray.put("weights of version 6")]))
    assert evaluator.collect(wait=False) is None, "training goes on"
    measured = ray.get(pinned.newest.remote())
    assert (measured.version, ray.get(list(measured.pieces))) == (5, ["weights of version 5"])
    service.free.set()
    evaluation = evaluator.collect(wait=True)
    assert evaluation is not None and (evaluation.step, len(evaluation.groups)) == (4, 3)


def test_version_is_evaluated_again_where_nothing_was_learned(stores: tuple[Any, Any]) -> None:
    newest, pinned = stores
    service = FakeService()
    service.free.set()
    evaluator = Evaluator(TrainConfig(), {"": TASKS}, service, {"": newest}, {"": pinned})
    ray.get(newest.publish.remote(5, [ray.put("weights of version 5")]))
    for step in (4, 5):
        evaluator.begin(step, version=5)
        evaluation = evaluator.collect(wait=True)
        assert evaluation is not None and evaluation.step == step
    assert {request.min_version for request in service.requests} == {5}


def test_what_ends_an_evaluation_reaches_the_loop(stores: tuple[Any, Any]) -> None:
    own = [{"": each} for each in stores]
    evaluator = Evaluator(TrainConfig(), {"": TASKS}, FakeService(RuntimeError("no engine")), *own)
    evaluator.begin(step=0, version=0)
    with pytest.raises(RuntimeError, match="no engine"):
        evaluator.collect(wait=True)


def test_engines_that_only_evaluate_take_no_address_of_their_own() -> None:
    config = TrainConfig()
    config.server.http_port, config.evaluation.num_replicas = 8000, 2
    changed = evaluation_server(config)
    assert (changed.num_replicas, changed.http_port) == (2, None)
    assert config.server.http_port == 8000
