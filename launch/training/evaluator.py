"""Sampled success on held-out tasks, under a policy version that stays the same meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import ray

from actors.rollouts.service import RolloutService
from actors.settings import ServerConfig
from environments.background import in_background
from environments.data.datasets import Dataset
from environments.types import TrajectoryGroup
from launch.settings.tree import TrainConfig
from launch.training.rollout_requests import evaluation_requests


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation: one group of one trajectory per task."""

    step: int
    groups: Sequence[TrajectoryGroup]
    seconds: float
    sets: Mapping[str, Sequence[TrajectoryGroup]] = field(default_factory=dict)
    """The groups of each set of tasks that has a name."""


@dataclass
class Evaluator:
    """Evaluates on the training's rollout service between two updates, or on one of its own during them.

    A service of its own has weight stores of its own, in which the evaluated version stays the newest.

    Args:
        sets: tasks that are held out from training, by the names of their sets.
        service: plays the held-out tasks.
        stores: the weight stores of the training, by the names of their policies.
        pinned: the weight stores of ``service``, if these are not the training's.
    """

    config: TrainConfig
    sets: Mapping[str, Dataset]
    service: RolloutService
    stores: Mapping[str, ray.actor.ActorHandle]
    pinned: Mapping[str, ray.actor.ActorHandle] | None
    _pinned_version: int = 0
    _running: tuple[int, Future[Evaluation]] | None = None

    def begin(self, step: int, version: int) -> None:
        """Begin to evaluate ``version``, the newest one, after ``step`` updates."""
        assert self._running is None, "one evaluation at a time: collect() comes before begin()"
        if self.pinned is None:
            evaluated = Future[Evaluation]()
            evaluated.set_result(self._evaluate(step, version))
            self._running = step, evaluated  # not before: what is interrupted leaves nothing to wait for
            return
        if version > self._pinned_version:  # else nothing was learned since the last evaluation
            # Taken here and now: by the time that the thread runs there may be a newer one.
            for policy, store in self.stores.items():
                newest = ray.get(store.newest.remote())
                ray.get(self.pinned[policy].publish.remote(version, newest.pieces))
            self._pinned_version = version
        self._running = step, in_background(partial(self._evaluate, step, version), "evaluation")

    @property
    def running_step(self) -> int | None:
        """The step of the evaluation that has been begun and not collected, if there is one."""
        return None if self._running is None else self._running[0]

    def collect(self, wait: bool) -> Evaluation | None:
        """The evaluation that has been begun, once it is finished, and once only.

        Raises:
            What has ended it.
        """
        if self._running is None or not (wait or self._running[1].done()):
            return None
        evaluation = self._running[1].result()
        self._running = None
        return evaluation

    def _evaluate(self, step: int, version: int) -> Evaluation:
        self.service.wait_until_up()
        start = time.monotonic()
        requests = {
            name: evaluation_requests(self.config, tasks, step, version, name)
            for name, tasks in self.sets.items()
        }
        played = self.service.stream.groups([each for of_set in requests.values() for each in of_set])
        groups = {group.group_id: group for group in played}
        sets = {name: [groups[each.group_id] for each in of_set] for name, of_set in requests.items()}
        everything = [group for of_set in sets.values() for group in of_set]
        return Evaluation(step, everything, time.monotonic() - start, sets)


def evaluation_server(config: TrainConfig) -> ServerConfig:
    """The policy server of evaluations: engines of its own, and no address for outsiders."""
    num_replicas = config.evaluation.num_replicas
    return replace(config.server, num_replicas=num_replicas, max_replicas=None, http_port=None)
