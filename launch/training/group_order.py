"""Which group is trained on next: what ``rollout.group_order`` chooses, and the group scheduler asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from environments.types import Trajectory
from launch.config import COMPLETION, RolloutConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedGroup:
    """A group that was requested and is not trained on yet."""

    number: int
    version: int
    """No token of it is older: the policy version at its request, or the oldest of what has come back."""


class GroupOrder(Protocol):
    """Decides which groups may be taken next."""

    def candidates(
        self, waiting: Sequence[RequestedGroup], version: int, num_used: int
    ) -> Sequence[RequestedGroup]:
        """Those of ``waiting`` that may be taken next, at least one: the first that is complete is.

        Args:
            waiting: requested and not taken, by their numbers; not empty.
            version: of the policy that is going to learn.
            num_used: places of its update that are used already.
        """


class TaskOrder:
    """The groups in the order of the tasks, however long they take.

    Which tasks an update is made of depends on no clock, and long rollouts are not put off.
    """

    def candidates(
        self, waiting: Sequence[RequestedGroup], version: int, num_used: int
    ) -> Sequence[RequestedGroup]:
        return waiting[:1]


class CompletionOrder:
    """Any group that is complete, the oldest first, as long as none of the others becomes too old by that.

    A group of version v may be learned from up to version v + max_staleness: that is when it is *due*. Each
    version learns from an update of ``groups_per_step`` places at least. So up to version d there are the
    places that are left in the present update, and ``groups_per_step`` for each version after it, and all
    groups can be in time exactly if, for each d, no more groups are due by d than there are places up to d.

    This holds always. Taking a group that is due at e uses up a place, so that for each d before e there is
    one less, for as many groups. It may be taken, therefore, unless for one of these d there are as many
    groups as places: then those that are due by d come first, and if none of them is complete, one is waited
    for. For e and later the group leaves too, and nothing changes; nor where a group is dropped and its place
    stays free, or where a version learns from two updates. Groups that are requested now are due last, when
    all are, and the slots are as many as the places up to then: (max_staleness + 1) * groups_per_step, less
    what is used of the present update. An update that is made again, after a lost learner or a resume, finds
    what it has dropped beside what has replaced it, which is more. But all that is too many is due last, and
    holds up nothing; and what was dropped is complete and older, comes first, and leaves without a place.

    The oldest of the complete groups comes first since it leaves the most room to the others.

    Args:
        groups_per_step: places of an update.
        max_staleness: versions by which a group may be behind the policy that learns from it.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness

    def candidates(
        self, waiting: Sequence[RequestedGroup], version: int, num_used: int
    ) -> Sequence[RequestedGroup]:
        oldest_first = sorted(waiting, key=lambda each: (each.version, each.number))
        for ahead in range(self._max_staleness):
            due = [each for each in oldest_first if each.version + self._max_staleness <= version + ahead]
            num_places = self._groups_per_step * (ahead + 1) - num_used
            if due and len(due) >= num_places:
                return due
        return oldest_first


def chosen_order(rollout: RolloutConfig) -> GroupOrder:
    """The order of ``rollout.group_order``."""
    if rollout.group_order == COMPLETION:
        return CompletionOrder(rollout.groups_per_step, rollout.max_staleness)
    return TaskOrder()


def oldest_version(trajectory: Trajectory) -> float:
    """The oldest policy version that sampled any of its tokens; infinite if nothing was sampled."""
    versions = [each.policy_version for each in trajectory.completions]
    return min(versions, default=float("inf"))
