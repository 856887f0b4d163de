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

An estimator with ``turns_by`` (gigpo, mt_grpo) has a unit for each turn besides, and a token the sum of the
advantages of both. A turn is worth its discounted return, the mean over the forks that follow it; one that
members share is one turn. It weighs ``omega`` times as much as its piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from environments.columns import stored
from environments.errors import LearnerError
from environments.types import Trajectory, TrajectoryGroup
from policies.learning.samples import TrainingSample, returns_to_go, turn_place

if TYPE_CHECKING:
    import torch

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
    order: np.ndarray = field(init=False)
    """[T] Place of each token among those of the samples, one sample after the other: a program that comes
    back to an earlier one of its conversations has turns of one sample between those of another."""

    def __post_init__(self) -> None:
        self.order = np.argsort(on_tokens(self.samples, "turns"), kind="stable")

    def column(self, name: str) -> np.ndarray:
        """[T] The values of a column of the samples."""
        return on_tokens(self.samples, name)[self.order]

    def in_samples(self, values: np.ndarray) -> list[np.ndarray]:
        """The values [T] of each sample, in the order that it has its tokens in."""
        ends = np.cumsum([sample.num_sampled_tokens for sample in self.samples])
        return np.split(values[np.argsort(self.order)], ends[:-1])

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
        turn_weight = algorithm.turn_weight if len(members) > 1 else 0.0
        if not any(tokens.trajectory.num_shared_turns for tokens in members):
            units += [unit for tokens in members for unit in _own_units(tokens, algorithm, turn_weight)]
        elif algorithm.compares_returns:
            units += _Branches(members, algorithm, turn_weight).units()
        else:
            raise LearnerError(
                f"Group {members[0].group.group_id!r} has forks, and algorithm.name={algorithm.name!r} with "
                f"algorithm.credit={algorithm.credit} does not compare them: set algorithm.name=rloo, say."
            )
    return units


def _own_units(tokens: SampledTokens, algorithm: Algorithm, turn_weight: float) -> list[CreditUnit]:
    """The units of a trajectory that shares nothing."""
    if algorithm.credit == "per_step":
        return _turn_units(tokens, algorithm)
    by_token = algorithm.estimator.by_token
    rewards = tokens.rewards if by_token else at_the_end(tokens.rewards.sum(), len(tokens.rewards))
    whole = CreditUnit(tokens, tokens.comparison_id, rewards)
    return [whole, *_turn_units(tokens, algorithm, turn_weight)] if turn_weight else [whole]


def _turn_units(
    tokens: SampledTokens,
    algorithm: Algorithm,
    weight: float = 1.0,
    first: int = 0,
    end: int | None = None,
    later: float = 0.0,
) -> list[CreditUnit]:
    """The units of the turns that sampled the tokens from ``first`` to ``end``, each worth its return.

    Args:
        later: the return of the turn that follows them.
    """
    turns, rewards = tokens.turns[first:end], tokens.rewards[first:end]
    if not len(turns) or turns[0] < 0:
        return []
    starts = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist()]
    parts = np.split(rewards, starts[1:])
    returns = returns_to_go([*(float(part.sum()) for part in parts), later], algorithm.gamma)[:-1]
    places = [turn_place(tokens.trajectory, int(turns[start]), algorithm) for start in starts]
    return [
        CreditUnit(
            tokens, f"{tokens.comparison_id} {place}", at_the_end(value, len(part)), first + start, weight
        )
        for place, start, part, value in zip(places, starts, parts, returns, strict=True)
    ]


class _Branches:
    """The tree that the members of a forked group are paths of."""

    def __init__(self, members: Sequence[SampledTokens], algorithm: Algorithm, turn_weight: float) -> None:
        self._members, self._algorithm, self._turn_weight = members, algorithm, turn_weight
        everyone = members[0].group.trajectories
        self._by_name = {each.rollout_id.rpartition("/")[2]: each for each in everyone}
        self._units: list[CreditUnit] = []

    def units(self) -> list[CreditUnit]:
        """The units of the group: of each piece one."""
        self._fork(self._members, 0, self._members[0].comparison_id, float(len(self._members)))
        return self._units

    def _fork(self, members: Sequence[SampledTokens], turn: int, name: str, weight: float) -> np.ndarray:
        """Add what follows after ``members`` have shared the turns before ``turn``; return what it is worth:
        the reward of a whole trajectory, and the discounted return from ``turn`` on.

        Args:
            name: of the place, for the comparison.
            weight: number of members that all of it together stands for.
        """
        branches: dict[str, list[SampledTokens]] = defaultdict(list)
        for tokens in members:
            branches[self._sampled_by(tokens.trajectory, turn)].append(tokens)
        part = weight / len(branches)
        worths = [self._branch(each, turn, name, part) for each in branches.values()]
        return np.asarray(np.mean(worths, axis=0))

    def _branch(
        self, members: Sequence[SampledTokens], start: int, name: str, weight: float
    ) -> tuple[float, float]:
        """Add a piece from turn ``start`` on, and what follows it; return what it is worth, as ``_fork``."""
        stop = start
        while len({self._sampled_by(each.trajectory, stop) for each in members}) == 1 and any(
            stop < len(each.trajectory.turns) for each in members
        ):
            stop += 1
        tokens = next((each for each in members if each.samples), members[0])
        first, end = np.searchsorted(tokens.turns, (start, stop)).tolist()
        place = len(self._units)
        if stop < max(len(each.trajectory.turns) for each in members):
            last = self._sampled_by(members[0].trajectory, stop - 1)
            name_after = f"{tokens.comparison_id} turn {stop} of {last}"
            value, later = self._fork(members, stop, name_after, weight).tolist()
        else:
            value, later = float(np.mean([each.rewards.sum() for each in members])), 0.0
        if first == end:  # it has nothing to train, and is compared with
            tokens = replace(tokens, samples=())
        rewards = at_the_end(value, max(1, end - first))
        self._units.insert(place, CreditUnit(tokens, name, rewards, first, weight))
        if not self._turn_weight:
            return value, 0.0
        turns = _turn_units(tokens, self._algorithm, self._turn_weight * weight, first, end, later)
        self._units[place + 1 : place + 1] = turns
        return value, float(turns[0].rewards[-1]) if turns else later

    def _sampled_by(self, trajectory: Trajectory, turn: int) -> str:
        """The member that ``turn`` was sampled for; after the end the one of the last turn, with a mark."""
        if turn >= len(trajectory.turns) > 0:
            return f"end of {self._sampled_by(trajectory, len(trajectory.turns) - 1)}"
        while turn < trajectory.num_shared_turns:
            if trajectory.forked_from not in self._by_name:
                return trajectory.forked_from
            trajectory = self._by_name[trajectory.forked_from]
        return trajectory.rollout_id.rpartition("/")[2]


def on_tokens(samples: Sequence[TrainingSample], name: str) -> np.ndarray:
    """The values of a column on the sampled tokens, one sample after the other."""
    rows = [
        np.asarray(stored(each, name), float)[np.asarray(stored(each, "loss_mask")) > 0] for each in samples
    ]
    return np.concatenate(rows) if rows else np.zeros(0)


def padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """[N, T] The rows, in float32, with zeros behind those that are shorter."""
    import torch

    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


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
        advantages[own] += unit.advantages
        returns[own], is_left_out[own] = unit.returns, False
    columns = map(tokens.in_samples, (advantages, returns, is_left_out))
    for sample, advantage, value, left_out in zip(tokens.samples, *columns, strict=True):
        credited = sample.replaced(
            advantages=sample.on_sampled_tokens(advantage),
            returns=sample.on_sampled_tokens(value) if algorithm.uses_critic else (),
        )
        yield credited.without_tokens(left_out) if is_left_out.any() else credited
