"""Worlds of a few turns with a policy in a table, whose gradient is known: groups are flat, or fork.

A turn is one token, the action. The policy sees what ``World.state`` makes of the actions so far. Members
are trajectories as rollouts are, and what is learned from them is what ``assign_credit`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from actors.rollouts.forks import ForkPoints
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from policies.learning.algorithm import Algorithm
from policies.learning.credit import assign_credit
from policies.learning.samples import training_samples

T = TypeVar("T")
Path = tuple[int, ...]
Draw = Callable[[np.ndarray], int]
"""Chooses an index by its probability."""
Gradient = dict[object, np.ndarray]
"""By the policy's logits in each state."""
QUESTION = 99


@dataclass(frozen=True)
class World:
    """What the actions of an episode lead to."""

    num_actions: int
    max_steps: int
    is_over: Callable[[Path], bool]
    reward: Callable[[Path], float]
    """Of a whole episode."""
    state: Callable[[Path], object] = lambda path: path
    """What the policy sees."""
    by_turn: bool = False
    """What a turn adds to the reward is earned in that turn, and not all of it in the last."""

    def has_ended(self, path: Path) -> bool:
        return len(path) == self.max_steps or self.is_over(path)


@dataclass
class Policy:
    """Logits of the actions by state: 0 where none are set."""

    world: World
    logits: dict[object, np.ndarray] = field(default_factory=dict)

    def probabilities(self, path: Path) -> np.ndarray:
        logits = self.logits.get(self.world.state(path), np.zeros(self.world.num_actions))
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())

    def score(self, path: Path, action: int) -> np.ndarray:
        """The gradient of the log-probability of ``action`` by the logits of its state."""
        return np.asarray(np.eye(self.world.num_actions)[action] - self.probabilities(path))


def play(policy: Policy, draw: Draw, beginning: Path = ()) -> Path:
    """Play an episode to its end, from the state after ``beginning`` on."""
    path = beginning
    while not policy.world.has_ended(path):
        path = (*path, draw(policy.probabilities(path)))
    return path


def trajectory(policy: Policy, path: Path, name: str) -> Trajectory:
    """The episode of ``path``, with a step for each turn."""
    steps = [
        Step(
            completion=Completion(
                prompt_ids=(QUESTION, *path[:turn]),
                completion_ids=(action,),
                logprobs=(math.log(policy.probabilities(path[:turn])[action]),),
                text="",
                finish_reason="stop",
            ),
            observation=policy.world.state(path[:turn]),
        )
        for turn, action in enumerate(path)
    ]
    reward = policy.world.reward(path)
    if policy.world.by_turn:
        for turn, step in enumerate(steps):
            step.reward = policy.world.reward(path[: turn + 1]) - policy.world.reward(path[:turn])
    else:
        steps[-1].reward = reward
    return Trajectory(rollout_id=name, steps=steps, reward=reward)


@dataclass(frozen=True)
class Shape:
    """Number of members of a group, and of those that begin with the task."""

    size: int
    roots: int
    at: str = "every 1"

    def group(self, policy: Policy, draw: Draw, name: str = "0") -> TrajectoryGroup:
        """Play a group: the roots, and the forks of each when it has ended."""
        paths = [play(policy, draw) for _ in range(self.roots)]
        members = [trajectory(policy, path, f"{name}/{index:04d}") for index, path in enumerate(paths)]
        forks = range(self.roots, self.size)
        for root, path in enumerate(paths):
            own = [member for member in forks if member % self.roots == root]
            points = ForkPoints(num_forks=len(own), at=self.at)
            turns = points.turns(members[root].steps, policy.world.max_steps) if own else ()
            for member, turn in zip(own, turns, strict=True):
                fork = trajectory(policy, play(policy, draw, path[:turn]), f"{name}/{member:04d}")
                fork.forked_from, fork.num_shared_turns = f"{root:04d}", len(path[:turn])
                members.append(fork)
        members.sort(key=lambda each: each.rollout_id)
        return TrajectoryGroup(group_id=name, task={}, trajectories=tuple(members))


def after_zero(steps: Sequence[Step], num_forks: int, max_steps: int) -> list[int]:
    """The turn after the first action 0, which looks at nothing that comes later; else the end."""
    answers = enumerate((one.completion for one in steps), 1)
    zeros = (turn for turn, answer in answers if answer and answer.completion_ids == (0,))
    return [next(zeros, max_steps)] * num_forks


def num_sampled(groups: Sequence[TrajectoryGroup]) -> int:
    """Tokens that were sampled for all members."""
    return sum(each.num_sampled_tokens for group in groups for each in group.trajectories)


def gradients(policy: Policy, groups: Sequence[TrajectoryGroup], algorithm: Algorithm) -> dict[str, Gradient]:
    """The policy gradient of each group, as a mean over its members."""
    samples = {
        each.rollout_id: training_samples(each)
        for group in groups
        for each in group.trajectories
        if each.steps
    }
    credited, _ = assign_credit(groups, samples, algorithm, 0.0)
    result: dict[str, Gradient] = {}
    for group in groups:
        own: Gradient = {}
        for sample in (one for each in group.trajectories for one in credited.get(each.rollout_id, ())):
            path = sample.response_ids
            for turn, (bit, advantage) in enumerate(zip(sample.loss_mask, sample.advantages, strict=True)):
                if bit:
                    term = advantage / len(group.trajectories) * policy.score(path[:turn], path[turn])
                    state = policy.world.state(path[:turn])
                    own[state] = own.get(state, np.zeros(policy.world.num_actions)) + term
        result[group.group_id] = own
    return result


def combined(parts: Sequence[tuple[float, Gradient]]) -> Gradient:
    """The sum of gradients, each times a weight."""
    result: Gradient = {}
    for weight, gradient in parts:
        for state, values in gradient.items():
            result[state] = result.get(state, np.zeros(len(values))) + weight * values
    return result


def exact_gradient(policy: Policy) -> Gradient:
    """The gradient of the expected reward, over all episodes."""
    parts = []
    for probability, path in outcomes(lambda draw: play(policy, draw)):
        scores = [
            (policy.world.state(path[:turn]), policy.score(path[:turn], path[turn]))
            for turn in range(len(path))
        ]
        parts += [(probability * policy.world.reward(path), {state: score}) for state, score in scores]
    return combined(parts)


class _Choices:
    """Draws that follow given choices, and take the first one after those."""

    def __init__(self, given: Path) -> None:
        self.probability = 1.0
        self.untried: list[Path] = []
        self._given, self._made = given, given[:0]

    def draw(self, probabilities: np.ndarray) -> int:
        position = len(self._made)
        choice = self._given[position] if position < len(self._given) else 0
        if position >= len(self._given):
            self.untried += [(*self._made, other) for other in range(1, len(probabilities))]
        self._made = (*self._made, choice)
        self.probability *= float(probabilities[choice])
        return choice


def outcomes(program: Callable[[Draw], T]) -> Iterator[tuple[float, T]]:
    """All results of a program that draws, each with its probability."""
    waiting: list[Path] = [()]
    while waiting:
        choices = _Choices(waiting.pop())
        result = program(choices.draw)
        waiting += choices.untried
        yield choices.probability, result


def distance(one: Mapping[object, np.ndarray], other: Mapping[object, np.ndarray]) -> float:
    """Length of the difference of two gradients."""
    states = {*one, *other}
    return math.sqrt(sum(float(np.sum((one.get(each, 0.0) - other.get(each, 0.0)) ** 2)) for each in states))


def length(gradient: Gradient) -> float:
    return distance(gradient, {})
