"""Updates of a policy in a table by the learner's own parts, in a world whose exact gradient is known.

Three tasks of at most three turns, with three actions of which the first one ends the episode: 15 episodes
each. What is left out is the model, and the optimizer's step. Groups are selected by ``launch.training``,
their samples are credited and corrected by ``policies.learning``, and the loss is that of
``policies.learning.verl``: so an import needs ``VERL_PLATFORM=cpu``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from forked_world import Path, Policy, World, outcomes, play, trajectory
from whole_batches import shards

from environments.types import Trajectory, TrajectoryGroup
from launch.settings.tree import TrainConfig
from launch.training.mini_batches import make_batches
from launch.training.selection import Selection, place
from launch.training.stages.reinforce import with_credit
from policies.learning.algorithm import Algorithm
from policies.learning.division import OLD_LOGPROBS, POLICY_COLUMNS
from policies.learning.kl import KLController
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import LearnerConfig
from policies.learning.verl.config import actor_config
from policies.learning.verl.data import scored
from policies.learning.verl.losses import policy_loss

# isort: split
from verl.utils import tensordict_utils as tu

NUM_ACTIONS, MAX_STEPS = 3, 3
RESPONSE_TOKENS = 20
"""Limit of a response, from which none is near."""
RIGHT = (1, 2, 1)
"""Actions of the graded task, each worth a third up to the first wrong one."""
RATE, NUM_VERSIONS = 4.0, 8
"""Steps up the exact gradient: the learner is at the fifth version, and the teacher at the last one."""
LEARNER = 4


def num_right(path: Path) -> int:
    """Actions before the first wrong one."""
    return next((turn for turn, each in enumerate(path) if each != RIGHT[turn]), len(path))


def _task(name: str, reward: Callable[[Path], float], by_turn: bool = False) -> World:
    return World(
        NUM_ACTIONS, MAX_STEPS, lambda path: path[-1:] == (0,), reward, lambda path: (name, path), by_turn
    )


TASKS = {
    "short": _task("short", lambda path: float(path == (0,))),
    "long": _task("long", lambda path: float(path == (2, 1, 2))),
    "graded": _task("graded", lambda path: num_right(path) / len(RIGHT), by_turn=True),
}
EPISODES = {
    name: [path for _, path in outcomes(partial(play, Policy(world)))] for name, world in TASKS.items()
}
STATES = {
    state: row
    for row, state in enumerate(
        dict.fromkeys(
            (name, path[:turn])
            for name, paths in EPISODES.items()
            for path in paths
            for turn in range(len(path))
        )
    )
}
"""Everything that the policy sees, with its row in the table."""


class Table:
    """A policy: logits [states, actions]."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits
        by_state = {state: logits[row] for state, row in STATES.items()}
        self.by_task = {name: Policy(world, by_state) for name, world in TASKS.items()}
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        self.probabilities = shifted / shifted.sum(-1, keepdims=True)

    def logprobs(self, task: str, path: Path) -> np.ndarray:
        """[T] Log-probability of each action."""
        rows = [STATES[task, path[:turn]] for turn in range(len(path))]
        return np.log(self.probabilities[rows, list(path)])

    def score(self, task: str, path: Path) -> np.ndarray:
        """The gradient of the log-probability of an episode, [states, actions]."""
        result = np.zeros_like(self.logits)
        for turn, action in enumerate(path):
            row = STATES[task, path[:turn]]
            result[row] -= self.probabilities[row]
            result[row, action] += 1
        return result

    def values(self, task: str, path: Path) -> list[float]:
        """The expected reward from before each action on, less what has been earned: an exact critic."""
        world = TASKS[task]
        chances = [(float(np.exp(self.logprobs(task, each).sum())), each) for each in EPISODES[task]]
        result = []
        for turn in range(len(path)):
            later = [(chance, each) for chance, each in chances if each[:turn] == path[:turn]]
            mean = sum(chance * world.reward(each) for chance, each in later) / sum(one for one, _ in later)
            result.append(mean - (world.reward(path[:turn]) if world.by_turn else 0.0))
        return result

    def draws(self, task: str) -> tuple[list[Path], np.ndarray]:
        """All episodes of a task and their probabilities."""
        return EPISODES[task], np.exp([self.logprobs(task, path).sum() for path in EPISODES[task]])


Reward = Callable[[str, Path], float]


def environment(task: str, path: Path) -> float:
    """The reward of the environment."""
    return TASKS[task].reward(path)


def exact_gradient(
    table: Table, reward: Reward = environment, tasks: Sequence[str] = tuple(TASKS)
) -> np.ndarray:
    """The gradient of the mean over ``tasks`` of the expected reward, over all episodes."""
    total = np.zeros_like(table.logits)
    for task in tasks:
        for path, chance in zip(*table.draws(task), strict=True):
            total += chance * reward(task, path) * table.score(task, path)
    return total / len(tasks)


def versions(seed: int = 0) -> list[Table]:
    """Policies of a training by exact gradients, from random logits on."""
    rng = np.random.default_rng(seed)
    tables = [Table(rng.normal(scale=0.7, size=(len(STATES), NUM_ACTIONS)))]
    while len(tables) < NUM_VERSIONS:
        tables.append(Table(tables[-1].logits + RATE * exact_gradient(tables[-1])))
    return tables


def group_of(table: Table, task: str, paths: Sequence[Path], name: str) -> TrajectoryGroup:
    """A group whose members played ``paths``, and beside them the greedy one."""

    def member(path: Path, place: str) -> Trajectory:
        return trajectory(table.by_task[task], path, f"{task} {name}/{place}")

    members = tuple(member(path, f"{index:04d}") for index, path in enumerate(paths))
    greedy = play(table.by_task[task], lambda chances: int(np.argmax(chances)))
    return TrajectoryGroup(
        group_id=f"{task} {name}", task={}, trajectories=members, baseline=member(greedy, "greedy")
    )


def drawn_groups(table: Table, size: int, seed: int) -> Iterator[TrajectoryGroup]:
    """Groups without end, each of a task that was drawn too."""
    rng, number = random.Random(seed), 0
    draws = {task: table.draws(task) for task in TASKS}
    while True:
        task = rng.choice(list(TASKS))
        yield group_of(table, task, rng.choices(*draws[task], k=size), f"{number:06d}")
        number += 1


@dataclass(frozen=True)
class Update:
    """The gradient of an update, and how many groups were played for it."""

    gradient: np.ndarray
    num_groups: int


class Learner:
    """The parts of the learner around a policy in a table.

    Args:
        staleness: how many updates ago the groups were sampled.
    """

    def __init__(self, table: Table, teacher: Table, algorithm: Algorithm, staleness: int) -> None:
        self._table, self._teacher, self._algorithm, self._version = table, teacher, algorithm, staleness
        self._loss = partial(policy_loss, algorithm, actor_config(LearnerConfig(), algorithm))
        self._config = TrainConfig()
        self._config.learner.mini_batch_size = 1_000_000
        self._config.rollout.max_staleness = staleness

    def update(self, groups: Iterator[TrajectoryGroup], wanted: int) -> Update:
        """The gradient by ``wanted`` groups of those that come."""
        selection = Selection()
        while len(selection.groups) < wanted:
            place(selection, next(groups), self._version, self._config, self._algorithm)
        rollouts = (each for group in selection.useful for each in group.trajectories)
        batches = [self._scored(batch) for batch in make_batches(self._config, rollouts, "update")]
        kl = KLController(self._algorithm)
        credited, _ = with_credit(self._algorithm, kl, selection.groups, batches)
        gradient = np.zeros_like(self._table.logits)
        for batch in credited:
            gradient += self.gradient(batch)
        return Update(gradient, len(selection.taken))

    def _scored(self, batch: TrainBatch) -> TrainBatch:
        """As ``VerlLearner.score`` and the critic: a first mini-batch has its old ones from the loss."""
        columns: dict[str, Callable[[str, TrainingSample], Sequence[float]]] = {}
        algorithm = self._algorithm
        if algorithm.bypass:
            columns["old_logprobs"] = lambda task, sample: sample.rollout_logprobs
        elif algorithm.needs_all_scores:
            columns["old_logprobs"] = lambda task, sample: self._table.logprobs(task, sample.response_ids)
        if algorithm.teacher is not None:
            columns["teacher_logprobs"] = lambda task, sample: self._teacher.logprobs(
                task, sample.response_ids
            )
        if algorithm.uses_critic:
            columns["values"] = lambda task, sample: self._table.values(task, sample.response_ids)
        for name, column in columns.items():
            rows = [tuple(map(float, column(_task_of(each), each))) for each in batch.samples]
            batch = batch.with_column(name, rows)
        return batch

    def gradient(self, batch: TrainBatch) -> np.ndarray:
        """Minus the gradient of the loss by the logits."""
        if not batch.has_sampled_tokens:
            return np.zeros_like(self._table.logits)
        [share] = shards(batch, 1, 1_000_000, 384, [*POLICY_COLUMNS, *OLD_LOGPROBS])
        data = scored(share, POLICY_COLUMNS | OLD_LOGPROBS if share.is_scored else POLICY_COLUMNS)
        num_tokens = sum(sample.num_sampled_tokens for sample in batch.samples)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens)
        logits = torch.tensor(self._table.logits, requires_grad=True)
        output = {"log_probs": _model_output(logits.log_softmax(-1), share.samples)}
        loss, _ = self._loss(model_output=output, data=data)
        loss.backward()
        assert logits.grad is not None
        return -logits.grad.numpy()


def _task_of(sample: TrainingSample) -> str:
    return sample.sample_id.partition(" ")[0]


def _model_output(logprobs: torch.Tensor, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """The log-probability of each next token, [P + R] for each sample, as verl's engine returns it."""
    places = []
    for sample in samples:
        path = sample.response_ids
        rows = [STATES[_task_of(sample), path[:turn]] for turn in range(len(path))]
        places.append(NUM_ACTIONS * torch.tensor(rows) + torch.tensor(path))
    flat = logprobs.flatten()
    columns = [torch.nn.functional.pad(flat[each], (0, 1)) for each in places]
    return torch.nested.as_nested_tensor(columns, layout=torch.jagged)
