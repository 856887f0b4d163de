"""Curricula: which task a group plays, by what was seen of the tasks so far.

A workload may have one: ``Workload(..., curriculum=SuccessBand(low=0.1, high=0.9))``. Without one every task
has its turn in each pass over the tasks, and is played. With one it still has its turn, and may be passed
over: a task of weight 0.3 is played at three of ten turns. No weight is below ``floor``, so that every task
is tried again and again, and what was too hard is found when it is not any more.

Results count when an update has used up their group, in the order in which it took the groups, and the next
tasks are chosen after that, by the seed. So a run that goes on from a checkpoint chooses the same tasks as
one that never stopped, as far as its updates are the same: bit for bit with ``rollout.max_staleness=0``.
"""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.bounds import check_bounds, setting
from environments.data.datasets import Dataset
from environments.errors import ConfigError, DatasetError
from environments.types import Trajectory


@dataclass(kw_only=True)
class Curriculum:
    """Plays each task at a share of its turns, which ``weight`` decides by the results so far.

    A subclass has a ``weight`` of its own; one with another plan replaces ``select`` and ``observe``, and
    keeps in ``state`` whatever it knows: it stays there, also when the tasks change.

    Args:
        by: a field of the tasks: those of equal values share their results. With ``None`` each task has its
            own, which begin to count when it has its next turn: they are worth nothing in the first pass.
        floor: smallest weight of a task, above 0 and at most 1.
        memory: share of the past in the running means of the results; the newest group has the rest.

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    by: str | None = None
    floor: float = setting(0.1, above=0, at_most=1)
    memory: float = setting(0.5, at_least=0, below=1)
    state: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Knowledge so far, by ``key`` of the tasks. The run puts it here, empty or from a checkpoint, which it
    reaches as JSON; changes are made in place."""

    def __post_init__(self) -> None:
        check_bounds(self, f"{type(self).__name__}.")

    def check(self, tasks: Dataset) -> None:
        """Raise ``DatasetError`` for a task that cannot be placed."""
        if self.by is None:
            return
        for index, task in enumerate(tasks):
            if self.by not in task:
                raise DatasetError(
                    f"The curriculum goes by the field {self.by!r}, and task {index} has none: give every "
                    f"task one, or set by to one of {', '.join(map(repr, task)) or 'its fields'}."
                )

    def key(self, task: Mapping[str, Any]) -> str:
        """The name under which ``state`` knows ``task``."""
        if self.by is not None:
            return str(task[self.by])
        return hashlib.blake2b(repr(task).encode(), digest_size=8).hexdigest()

    def weight(self, key: str) -> float:
        """Share of their turns at which the tasks of ``key`` are played, from 0 to 1: here each of them.

        Args:
            key: one that ``state`` may not have: then nothing is known of these tasks.
        """
        return 1.0

    def select(self, tasks: Dataset, turns: Iterator[int], rng: random.Random) -> int:
        """Choose the task that the next group plays; return its place in ``tasks``.

        Args:
            turns: places of the tasks whose turn it is, without end, in the order of the run; those that
                failed everywhere have none. What is taken from it has had its turn.
            rng: of this group.
        """
        return next(
            index for index in turns if rng.random() < max(self.floor, self.weight(self.key(tasks[index])))
        )

    def observe(self, task: Mapping[str, Any], rollouts: Sequence[Trajectory]) -> None:
        """Take note of a group that an update has used up.

        Args:
            task: of the group.
            rollouts: members of the group, one at least, without those that infrastructure has spoilt.
        """
        newest = {
            "success": statistics.fmean(each.succeeded for each in rollouts),
            "variance": statistics.pvariance(each.reward for each in rollouts),
        }
        known = self.state.setdefault(self.key(task), {"groups": 0, **newest})
        known["groups"] += 1
        for name, value in newest.items():
            known[name] = self.memory * known[name] + (1 - self.memory) * value

    def metrics(self) -> dict[str, float]:
        """Numbers of the curriculum for those who watch the run, without ``curriculum/`` before them."""
        weights = [max(self.floor, self.weight(key)) for key in self.state]
        return {"known": len(weights), "weight_mean": statistics.fmean(weights) if weights else 1.0}


@dataclass(kw_only=True)
class SuccessBand(Curriculum):
    """Plays tasks whose success rate lies from ``low`` to ``high``, and those of which nothing is known.

    Groups of others mostly agree with themselves, and teach nothing (Bae et al. 2025, "Online Difficulty
    Filtering for Reasoning Oriented Reinforcement Learning").

    Args:
        low: least success rate, of the running mean over the groups of a task.
        high: largest one.

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    low: float = 0.1
    high: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low < self.high <= 1:
            raise ConfigError(
                f"SuccessBand(low={self.low}, high={self.high}): set two rates from 0 to 1, the lower first."
            )

    def weight(self, key: str) -> float:
        known = self.state.get(key)
        return 1.0 if known is None else float(self.low <= known["success"] <= self.high)


@dataclass(kw_only=True)
class RewardVariance(Curriculum):
    """Plays a task the more often the more the rewards of its groups vary.

    For rewards of 0 and 1 that is p (1 - p), its learnability (Foster et al. 2025, "Learning to Reason at
    the Frontier of Learnability", section 3).

    Args:
        largest: variance from which on a task is played at every turn: 0.25 is the most that rewards from 0
            to 1 can have, (b - a)^2 / 4 that of rewards from a to b.

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    largest: float = setting(0.25, above=0)

    def weight(self, key: str) -> float:
        known = self.state.get(key)
        return 1.0 if known is None else min(1.0, known["variance"] / self.largest)


@dataclass(kw_only=True)
class Levels(Curriculum):
    """Plays the tasks of one level at each turn, those of the others by the ``floor``.

    It is the first level that is not mastered, or the last (Bengio et al. 2009, "Curriculum Learning"). One
    whose success falls again is played again.

    Args:
        by: the field of the tasks that names their level.
        order: the levels, the first one first.
        success: success rate from which on a level is mastered, by a running mean over its groups.
        groups: number of groups of a level before which it is not.

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    by: str
    order: Sequence[Any]
    success: float = setting(0.8, above=0, at_most=1)
    groups: int = setting(8, at_least=1)
    memory: float = setting(0.9, at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order or len({*map(str, self.order)}) < len(self.order):
            raise ConfigError(f"Levels(order={self.order!r}): name one level at least, and each once.")

    def check(self, tasks: Dataset) -> None:
        super().check(tasks)
        names = {*map(str, self.order)}
        for index, task in enumerate(tasks):
            if self.key(task) not in names:
                raise DatasetError(
                    f"Task {index} has {self.by}={task[self.by]!r}, which is none of the levels in "
                    f"Levels(order={list(self.order)!r}): add it there, or leave the task out."
                )

    @property
    def present(self) -> int:
        """Place of the level in ``order`` whose tasks are played now."""
        last = len(self.order) - 1
        levels = enumerate(map(str, self.order))
        return next((place for place, level in levels if not self._is_mastered(level)), last)

    def _is_mastered(self, level: str) -> bool:
        known = self.state.get(level)
        return known is not None and known["groups"] >= self.groups and known["success"] >= self.success

    def weight(self, key: str) -> float:
        return float(key == str(self.order[self.present]))

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"level": self.present}
