"""Units of credit: the tokens of an update, cut into the parts that get one advantage together.

Without forks a unit is a trajectory, or with credit by turn a turn. The members of a forked group are the
paths of a tree. A unit is there a piece of a path between two forks::

    turns  0  1 │ 2  3 │ 4           one root that two members fork from, after turn 1 and after turn 3
    0000   ───a─┬──b──┬──c──         a is worth the mean of b and e, b the mean of c and d
    0002        │     └──d──         c is compared with d, b with e, and a with the other roots
    0003        └──e─────────

A unit is worth the mean of those that follow it, and the last one its trajectory's return. It is compared
with the others that begin at the same fork. What members share is trained in the first of them that is
trained on, and stands there for a part of the group: of its ``n`` members each of ``r`` roots for ``n / r``,
and each unit after a fork for an equal part of the one before it. So the gradient is the flat one's in the
mean, where the turn of a fork depends on nothing that comes after it, and an advantage is a distance from
the others alone (rloo). A distance from a mean that counts the unit itself (grpo without the deviation, gpg)
is smaller by 1/k among k units; only where all forks have as many does that leave the direction. A division
by the deviation (grpo) or by the trained tokens (token-mean) changes it, as it does in flat groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from environments.columns import stored
from environments.errors import LearnerError
from environments.types import Trajectory, TrajectoryGroup
from policies.learning.samples import TrainingSample, returns_to_go

if TYPE_CHECKING:
    from policies.learning.algorithm import Algorithm


@dataclass(eq=False, slots=True)
class SampledTokens:
    """The sampled tokens of one trajectory, T of them; one entry stands for a trajectory without any.

    Where a policy has played several seats, those of one seat.
    """

    trajectory: Trajectory
    group: TrajectoryGroup
    seat: str
    samples: Sequence[TrainingSample]
    """Empty if it is not trained on."""
    turns: np.ndarray
    """[T] The step that sampled the token; -1 if nothing was sampled."""
    rewards: np.ndarray
    """[T] Each turn's reward on its last token, less the algorithm's penalties."""

    def column(self, name: str) -> np.ndarray:
        """[T] A column of the samples, on the sampled tokens.

        Tokens stand in the order of the turns; those of the samples do not where conversations took turns.
        """
        return self._of_samples(name)[self._places()]

    def by_sample(self, column: np.ndarray) -> np.ndarray:
        """[T] ``column`` in the order in which the samples have the tokens, one sample after the other."""
        ordered = np.empty_like(column)
        ordered[self._places()] = column
        return ordered

    def _places(self) -> np.ndarray:
        return np.argsort(self._of_samples("turns"), kind="stable")

    def _of_samples(self, name: str) -> np.ndarray:
        columns = [(stored(sample, name), stored(sample, "loss_mask")) for sample in self.samples]
        return np.concatenate([np.asarray(each, dtype=float)[np.asarray(mask) > 0] for each, mask in columns])

    @property
    def comparison_id(self) -> str:
        """Name of all that it is compared with: the group, and there the seat."""
        return f"{self.group.group_id} seat {self.seat}" if self.seat else self.group.group_id


@dataclass(eq=False, slots=True)
class CreditUnit:
    """Tokens that get one advantage together, N of them: all of a trajectory, or those of some turns."""

    tokens: SampledTokens
    """Sampled tokens of the trajectory in which it is trained."""
    comparison_id: str
    """Units with the same id are compared with each other."""
    rewards: np.ndarray
    """[N]"""
    first: int = 0
    """Position of its first token among those of the trajectory."""
    weight: float = 1.0
    """Number of members of the group that it stands for."""
    advantages: np.ndarray = field(init=False)
    """[N] 0 where there is nothing to compare with."""
    returns: np.ndarray = field(init=False)
    """[N]"""
    compared: bool = False

    def __post_init__(self) -> None:
        self.advantages, self.returns = np.zeros(len(self.rewards)), self.rewards


def credit_units(sampled: Sequence[SampledTokens], algorithm: Algorithm) -> list[CreditUnit]:
    """The units of an update, in the order of ``sampled``.

    Raises:
        LearnerError: a group has forks, and the algorithm does not compare its members by whole returns.
    """
    by_comparison: dict[str, list[SampledTokens]] = defaultdict(list)
    for tokens in sampled:
        by_comparison[tokens.comparison_id].append(tokens)
    units: list[CreditUnit] = []
    for members in by_comparison.values():
        if not any(tokens.trajectory.num_shared_turns for tokens in members):
            units += [unit for tokens in members for unit in _own_units(tokens, algorithm)]
        elif algorithm.compares_returns:
            units += _Branches(members).units()
        else:
            raise LearnerError(
                f"Group {members[0].group.group_id!r} has forks, and algorithm.name={algorithm.name!r} with "
                f"algorithm.credit={algorithm.credit} does not compare members where they fork: set "
                "algorithm.name=rloo, for example."
            )
    return units


def _own_units(tokens: SampledTokens, algorithm: Algorithm) -> list[CreditUnit]:
    """The units of a trajectory that shares nothing."""
    if algorithm.credit == "broadcast":
        by_token = algorithm.estimator.by_token
        rewards = tokens.rewards if by_token else at_the_end(tokens.rewards.sum(), len(tokens.rewards))
        return [CreditUnit(tokens, tokens.comparison_id, rewards)]
    if tokens.turns[0] < 0:
        return []
    starts = [0, *(np.flatnonzero(np.diff(tokens.turns)) + 1).tolist()]
    parts = np.split(tokens.rewards, starts[1:])
    returns = returns_to_go([float(part.sum()) for part in parts], algorithm.gamma)
    return [
        CreditUnit(
            tokens, f"{tokens.comparison_id} turn {tokens.turns[start]}", at_the_end(value, len(part)), start
        )
        for start, part, value in zip(starts, parts, returns, strict=True)
    ]


class _Branches:
    """The tree that the members of a forked group are paths of."""

    def __init__(self, members: Sequence[SampledTokens]) -> None:
        self._members = members
        everyone = members[0].group.trajectories
        self._by_name = {each.rollout_id.rpartition("/")[2]: each for each in everyone}
        self._units: list[CreditUnit] = []

    def units(self) -> list[CreditUnit]:
        """The units of the group: of each piece one."""
        self._fork(self._members, 0, self._members[0].comparison_id, float(len(self._members)))
        return self._units

    def _fork(self, members: Sequence[SampledTokens], turn: int, name: str, weight: float) -> float:
        """Add what follows after ``members`` have shared the turns before ``turn``; return what it is worth.

        Args:
            name: of the place, for the comparison.
            weight: number of members that all of it together stands for.
        """
        branches: dict[str, list[SampledTokens]] = defaultdict(list)
        for tokens in members:
            branches[self._sampled_by(tokens.trajectory, turn)].append(tokens)
        part = weight / len(branches)
        return float(np.mean([self._branch(each, turn, name, part) for each in branches.values()]))

    def _branch(self, members: Sequence[SampledTokens], start: int, name: str, weight: float) -> float:
        """Add a piece from turn ``start`` on, and what follows it; return its value."""
        stop = start
        while len({self._sampled_by(each.trajectory, stop) for each in members}) == 1 and any(
            stop < len(each.trajectory.steps) for each in members
        ):
            stop += 1
        tokens = next((each for each in members if each.samples), members[0])
        first, end = np.searchsorted(tokens.turns, (start, stop)).tolist()
        place = len(self._units)
        if stop < max(len(each.trajectory.steps) for each in members):
            last = self._sampled_by(members[0].trajectory, stop - 1)
            value = self._fork(members, stop, f"{tokens.comparison_id} turn {stop} of {last}", weight)
        else:
            value = float(np.mean([each.rewards.sum() for each in members]))
        if first == end:  # it has nothing to train, and is compared with
            tokens = replace(tokens, samples=())
        rewards = at_the_end(value, max(1, end - first))
        self._units.insert(place, CreditUnit(tokens, name, rewards, first, weight))
        return value

    def _sampled_by(self, trajectory: Trajectory, turn: int) -> str:
        """The member that ``turn`` was sampled for; after the end the one of the last turn, with a mark."""
        if turn >= len(trajectory.steps) > 0:
            return f"end of {self._sampled_by(trajectory, len(trajectory.steps) - 1)}"
        while turn < trajectory.num_shared_turns:
            if trajectory.forked_from not in self._by_name:
                return trajectory.forked_from
            trajectory = self._by_name[trajectory.forked_from]
        return trajectory.rollout_id.rpartition("/")[2]


def at_the_end(value: float, length: int) -> np.ndarray:
    """[length] ``value`` on the last token, and 0 before."""
    return np.append(np.zeros(length - 1), value)


def with_advantages(
    tokens: SampledTokens, units: Sequence[CreditUnit], algorithm: Algorithm
) -> Iterator[TrainingSample]:
    """The samples of one trajectory with what ``units`` have found; what is in none is not trained in it."""
    if not tokens.samples:
        return
    advantages, returns = np.zeros(len(tokens.turns)), np.zeros(len(tokens.turns))
    is_left_out = np.ones(len(tokens.turns), dtype=bool)
    for unit in units:
        own = slice(unit.first, unit.first + len(unit.rewards))
        advantages[own], returns[own], is_left_out[own] = unit.advantages, unit.returns, False
    each_advantage, each_return, left_out = (
        iter(tokens.by_sample(each).tolist()) for each in (advantages, returns, is_left_out)
    )
    for sample in tokens.samples:
        credited = sample.replaced(
            advantages=sample.on_sampled_tokens(each_advantage),
            returns=sample.on_sampled_tokens(each_return) if algorithm.uses_critic else (),
        )
        if is_left_out.any():
            credited = credited.without_tokens(list(islice(left_out, sample.num_sampled_tokens)))
        yield credited
