"""A policy of a few numbers that learns by Troupe's own choice of tasks and groups, in seconds and alone.

It stands for engine and learner: the tasks are easy, right or impossible, a third each, and the right ones
have features, so that what is learned from one of them helps the others. Everything between the tasks and
the update is the run's own: ``TaskPlan``, ``Rollouts``, ``select_groups``, ``RunState`` with its checkpoints.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from trained_run import save_whole

from actors.rollouts.rollout import RolloutRequest
from environments import Dataset, SingleTurnEnvironment
from environments.data.curriculum import Curriculum
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.settings.tree import TrainConfig
from launch.training.rollouts import Rollouts
from launch.training.run_state import RunState
from launch.training.selection import Selection, select_groups
from launch.training.task_plan import TaskPlan
from launch.workload import Workload
from policies.agents.game import GameAgent
from policies.learning.algorithm import Algorithm

EASY, RIGHT, IMPOSSIBLE = KINDS = ("easy", "right", "impossible")
NUM_FEATURES = 8
MINI_BATCH = 16
"""Rollouts of an optimizer step."""
LOGITS = {EASY: 4.0, RIGHT: -1.5, IMPOSSIBLE: -20.0}
"""Log-odds of success before anything is learned: 0.98, 0.18 and 0."""


def mixture(num_tasks: int, seed: int = 0) -> Dataset:
    """As many easy as right and as impossible tasks."""
    rng = random.Random(seed)
    tasks = []
    for index in range(num_tasks):
        kind = KINDS[index % 3]
        own = [rng.gauss(0, 0.5) for _ in range(NUM_FEATURES)]
        common = [1.0] + [0.0] * (NUM_FEATURES - 1)
        features = [a + b for a, b in zip(own, common, strict=True)]
        tasks.append({"task": index, "kind": kind, "features": features if kind == RIGHT else []})
    return Dataset(tasks)


class LogisticPolicy:
    """Succeeds at a task with a probability whose log-odds are linear in the features of the task."""

    def __init__(self, rate: float = 0.1) -> None:
        self._weights, self._rate = np.zeros(NUM_FEATURES), rate

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(self._weights.tolist())

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        self._weights = np.array(weights)

    def probability(self, task: dict[str, Any]) -> float:
        features = np.array(task["features"] or [0.0] * NUM_FEATURES)
        return float(1 / (1 + np.exp(-(LOGITS[task["kind"]] + features @ self._weights))))

    def success(self, tasks: Dataset) -> float:
        """Mean probability over the right tasks."""
        return float(np.mean([self.probability(task) for task in tasks if task["kind"] == RIGHT]))

    def learn(self, groups: Sequence[TrajectoryGroup], seed: str) -> None:
        """Take a step of gradient ascent for each mini-batch, by the advantages of GRPO."""
        gradients = [each for group in groups for each in self._gradients(group)]
        random.Random(seed).shuffle(gradients)
        for start in range(0, len(gradients), MINI_BATCH):
            step = np.mean(gradients[start : start + MINI_BATCH], axis=0)
            self._weights = self._weights + self._rate * step

    def _gradients(self, group: TrajectoryGroup) -> list[np.ndarray]:
        task, rewards = group.task, np.array([each.reward for each in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        features = np.array(task["features"] or [0.0] * NUM_FEATURES)
        probability = self.probability(task)
        return [
            advantage * (reward - probability) * features
            for advantage, reward in zip(advantages, rewards, strict=True)
        ]


@dataclass
class PolicyStream:
    """Plays a group with the policy when it is taken, but for those of its rollouts that are finished."""

    policy: LogisticPolicy
    requested: list[int] = field(default_factory=list)
    """Tasks of the groups that were requested."""
    num_played: int = 0
    num_until_interrupt: float = math.inf
    """Groups that are taken before a Ctrl-C."""
    _groups: dict[str, list[RolloutRequest]] = field(default_factory=dict)
    _finished: dict[str, Trajectory] = field(default_factory=dict)

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        for request in requests:
            if request.group_id not in self._groups:
                self.requested.append(request.task["task"])
            self._groups.setdefault(request.group_id, []).append(request)
        self._finished |= {each.rollout_id: each for each in finished}

    def take(self, *group_ids: str) -> TrajectoryGroup:
        if not self.num_until_interrupt:
            raise KeyboardInterrupt
        self.num_until_interrupt -= 1
        requests = self._groups.pop(group_ids[0])
        members = tuple(self._finished.pop(each.rollout_id, None) or self._play(each) for each in requests)
        return TrajectoryGroup(group_id=group_ids[0], task=requests[0].task, trajectories=members)

    def _play(self, request: RolloutRequest) -> Trajectory:
        self.num_played += 1
        reward = float(random.Random(request.seed).random() < self.policy.probability(request.task))
        completion = Completion(
            prompt_ids=(1,),
            completion_ids=(2,),
            logprobs=(-0.5,),
            text="",
            finish_reason="stop",
            policy_version=request.min_version,
        )
        return Trajectory(
            task=request.task,
            rollout_id=request.rollout_id,
            reward=reward,
            steps=[Step(completion=completion, reward=reward)],
            termination_reason=TerminationReason.ENV_DONE,
        )

    def finished(self) -> list[Trajectory]:
        return list(self._finished.values())


class SimulatedTraining:
    """A run in ``folder``, from its checkpoint if there is one.

    Args:
        algorithm: which groups an update is made of.
    """

    def __init__(
        self,
        folder: Path,
        tasks: Dataset,
        curriculum: Curriculum | None,
        algorithm: Algorithm,
        seed: int = 0,
        max_staleness: int = 0,
    ) -> None:
        self.tasks, self._algorithm = tasks, algorithm
        self.config = config = TrainConfig(seed=seed)
        config.run.resume, config.run.directory = True, str(folder)
        config.rollout.max_staleness = max_staleness
        self.policy = LogisticPolicy()
        self.said: list[str] = []
        folder.mkdir(exist_ok=True)
        self.state = RunState(config, folder)
        if self.state.checkpoint is not None:
            text = (self.state.checkpoint / "policy").read_text()
            self.policy.weights = [float.fromhex(each) for each in text.split()]
        workload = Workload(
            agent_class=GameAgent, env_class=SingleTurnEnvironment, train_dataset=tasks, curriculum=curriculum
        )
        self._tracker = cast(Any, SimpleNamespace(announce=self.said.append, failures=lambda groups: None))
        self.plan = TaskPlan(config, workload, False, self.state, self._tracker)
        self.stream = PolicyStream(self.policy)
        self.rollouts = Rollouts(self.stream, self.plan, config.rollout, self.state.progress, 10_000)
        self.rollouts.begin(self.plan.still_wanted(self.state.saved_stream()))
        self.metrics: dict[str, float] = {}

    def update(self) -> Selection:
        """Make an update."""
        progress = self.state.progress
        selection = select_groups(
            self.config, self._algorithm, self.rollouts, progress.version, self._tracker
        )
        self.policy.learn(selection.useful, f"{self.config.seed}/{progress.step}")
        progress.step += 1
        progress.version += 1
        self.metrics = self.rollouts.commit()
        return selection

    def save(self) -> None:
        """Write a checkpoint."""

        def save_policy(folder: str) -> None:
            Path(folder, "policy").write_text(" ".join(each.hex() for each in self.policy.weights))

        save_whole(self.state, self.rollouts.state(), save_policy)

    def rollouts_until(self, success: float, most_updates: int = 2000) -> int:
        """Rollouts until the policy has that success."""
        for _ in range(most_updates):
            if self.policy.success(self.tasks) >= success:
                return self.stream.num_played
            self.update()
        raise AssertionError(f"{most_updates} updates did not reach a success of {success}.")
