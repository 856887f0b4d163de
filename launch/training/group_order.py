"""The order of completion, which ``rollout.group_order`` may choose for ``Rollouts``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from environments.types import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedGroup:
    """A group that was requested and is not trained on yet."""

    number: int
    version: int
    """No token of it is older: the policy version at its request, or the oldest of what has come back."""


@dataclass(frozen=True)
class CompletionOrder:
    """Any complete group, the oldest first, as long as no other group becomes too old by that.

    This is the feasibility test of earliest-deadline-first scheduling: groups are the jobs, and places in
    updates are the time. A group of version v has the deadline v + max_staleness, the last version that may
    learn from it. Each version learns from an update of ``groups_per_step`` places. So up to version d there
    are ``groups_per_step`` places per version, less the ``num_used`` of the present update. All groups can
    meet their deadlines exactly if, for each d, no more groups have a deadline up to d than there are places
    up to d.

    Taking a group with deadline e uses up one place. For each d before e, that is one place less for the same
    groups. From e on, the group is gone with its place, and nothing changes. So any group may be taken,
    unless for one of these d there are as many groups as places: then only the groups with a deadline up to d
    may be taken, and if none of them is complete, the update waits for one.

    The condition holds at any time. New groups have the latest deadline of all, and there are never more
    groups than places up to it: (max_staleness + 1) * groups_per_step, less ``num_used``. A group that is
    dropped leaves its place free, and a version that learns from two updates has more places. Only an update
    that is made again, after a lost learner or a resume, may find too many groups: those that it has dropped,
    and those that have replaced them. The surplus has the latest deadline and delays no other group; and a
    group that was dropped is complete and older, so it is looked at first, and leaves without using a place.

    The oldest complete group comes first because it leaves the most room to the others.

    Args:
        groups_per_step: places of an update.
        max_staleness: versions by which a group may be behind the policy that learns from it.
    """

    groups_per_step: int
    max_staleness: int

    def candidates(
        self, waiting: Sequence[RequestedGroup], version: int, num_used: int
    ) -> Sequence[RequestedGroup]:
        """Members of ``waiting`` that may be taken next, at least one: the first that is complete is.

        Args:
            waiting: requested and not taken; not empty.
            version: of the policy that is going to learn.
            num_used: places of its update that are used already.
        """
        oldest_first = sorted(waiting, key=lambda each: (each.version, each.number))
        for ahead in range(self.max_staleness):
            due = [each for each in oldest_first if each.version + self.max_staleness <= version + ahead]
            num_places = self.groups_per_step * (ahead + 1) - num_used
            if due and len(due) >= num_places:
                return due
        return oldest_first


def oldest_version(trajectory: Trajectory) -> float:
    """The oldest policy version that sampled any of its tokens; infinite if nothing was sampled."""
    versions = [each.policy_version for each in trajectory.completions]
    return min(versions, default=float("inf"))
