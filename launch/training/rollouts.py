"""Rollouts that a training learns from: requested ahead of the learner, taken group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.rollouts.rollout import RolloutRequest
from environments.types import Trajectory, TrajectoryGroup
from launch.run_folder.checkpoint import Progress, StreamState
from launch.settings.tree import COMPLETION, RolloutConfig
from launch.training.rollout_requests import group_name
from launch.training.task_plan import TaskPlan


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


class RolloutSource(Protocol):
    """Groups of rollouts on request: ``TrajectoryStream`` plays them, ``RecordedRollouts`` reads them.

    A group is requested once, with all its rollouts in one call, and taken once.
    """

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        """Have ``requests`` rolled out, except those that are ``finished`` already: a resumed run plays
        nothing twice.
        """
        ...

    def take(self, *group_ids: str) -> TrajectoryGroup:
        """The first of the requested groups ``group_ids`` that is complete. This waits for one.

        Args:
            group_ids: the one to prefer first, where several are complete.

        Raises:
            RayActorError, or the fleet's own error: no process is left that could deliver it.
        """
        ...

    def finished(self) -> list[Trajectory]:
        """Trajectories that a checkpoint has to keep: they are here, and their groups were not taken."""
        ...


class Rollouts:
    """Keeps a bounded number of groups on their way until the last update has its groups.

    A group holds a slot while it waits, and while it is taken::

        free slot ──request──▶ waiting ──take──▶ taken ──commit──▶ trained on and published: slot free
                                  ▲               │ │
                                  └───put_back────┘ └──replace───▶ dropped: slot free at once

    There are (max_staleness + 1) * groups_per_step slots. A group that is requested under version v therefore
    has fewer than that many before it. In the order of the tasks it is trained on by the update of version
    v + max_staleness at the latest, and no token of it is older than v: that is what bounds staleness.
    ``CompletionOrder`` says how another order keeps that bound.

    Args:
        source: where groups are requested and come back.
        plan: the task of each group.
        rollout: slots, and the order in which groups are taken.
        progress: how far the run has come. ``commit`` counts its groups.
        num_updates: policy updates of the whole run.
    """

    def __init__(
        self,
        source: RolloutSource,
        plan: TaskPlan,
        rollout: RolloutConfig,
        progress: Progress,
        num_updates: int,
    ) -> None:
        self._source, self._plan, self._progress = source, plan, progress
        is_free = rollout.group_order == COMPLETION
        self._order = CompletionOrder(rollout.groups_per_step, rollout.max_staleness) if is_free else None
        """``None`` in the order of the tasks: no clock decides then which tasks an update is made of, and
        long rollouts are not put off."""
        self._groups_per_step = rollout.groups_per_step
        self._num_slots = (rollout.max_staleness + 1) * rollout.groups_per_step
        self._num_wanted = num_updates * rollout.groups_per_step
        self.num_requested = progress.num_groups
        """Number of the next group that will be requested."""
        self._waiting: list[RequestedGroup] = []
        """Requested and not taken, by their numbers."""
        self._taken: dict[RequestedGroup, TrajectoryGroup] = {}
        """Taken since the last ``commit``: the groups of the present update, and those dropped for it."""
        self._num_dropped = 0
        """Groups of ``_taken`` that gave back their slots."""
        self._put_back: dict[str, TrajectoryGroup] = {}
        """Groups of ``_waiting`` that were taken once, by an update that was not made."""
        self.have_begun = False
        """True once groups have been requested: their state is here then, and not in a file."""

    # -- one update after the other ------------------------------------------------------------------

    def begin(self, saved: StreamState) -> None:
        """Request the first groups: those of a checkpoint, and others for the slots that are left.

        What was ready is not played again, what was under way is. All groups were requested that are behind
        us or in ``saved``: so the next one has the number of both together, also where the order of
        completion has left gaps between those that are behind us.
        """
        version = self._progress.version
        ages: dict[int, list[float]] = defaultdict(list)
        for trajectory in saved.ready:
            ages[_number(trajectory.rollout_id)].append(oldest_version(trajectory))
        for rollout_id in saved.in_flight:  # it is played anew
            ages[_number(rollout_id)].append(version)
        self._waiting = [
            RequestedGroup(number=number, version=int(min(version, *ages[number]))) for number in sorted(ages)
        ]
        self.num_requested += len(self._waiting)
        requests = [
            request for each in self._waiting for request in self._plan.requests(each.number, version)
        ]
        if requests:
            self._source.request(requests, saved.ready)
        self.have_begun = True
        self.request()

    def request(self, num_selected: int = 0) -> None:
        """Request groups for the free slots, and no more than the updates that are left will take.

        Args:
            num_selected: groups that are there already for the update that is being made.
        """
        version = self._progress.version
        num_held = len(self._waiting) + len(self._taken) - self._num_dropped
        num_left = self._num_wanted - self._progress.step * self._groups_per_step - num_selected
        num_new = max(0, min(self._num_slots - num_held, num_left - len(self._waiting)))
        numbers = range(self.num_requested, self.num_requested + num_new)
        requests = [request for number in numbers for request in self._plan.requests(number, version)]
        if requests:
            self._source.request(requests)
        self._waiting += [RequestedGroup(number=number, version=version) for number in numbers]
        self.num_requested += num_new

    def take(self) -> TrajectoryGroup:
        """The next group of ``rollout.group_order``, once it is complete.

        Raises:
            EnvironmentFailure: too many rollouts have failed.
            The errors of ``RolloutSource.take``.
        """
        num_used = len(self._taken) - self._num_dropped
        candidates: Sequence[RequestedGroup] = self._waiting[:1]
        if self._order is not None:
            candidates = self._order.candidates(self._waiting, self._progress.version, num_used)
        by_name = {group_name(each.number): each for each in candidates}
        again = next(filter(self._put_back.__contains__, by_name), None)
        group = self._source.take(*by_name) if again is None else self._put_back.pop(again)
        requested = by_name[group.group_id]
        self._waiting.remove(requested)
        self._taken[requested] = group
        self._plan.record_failures(group, self.num_requested)
        return group

    def put_back(self) -> None:
        """Have the groups taken again that were taken for an update which was not made."""
        self._put_back |= {group.group_id: group for group in self._taken.values()}
        self._waiting = self._uncommitted()
        self._taken, self._num_dropped = {}, 0

    def replace(self, num_selected: int) -> None:
        """Request another group for the one that was taken last and is dropped."""
        self._num_dropped += 1
        self.request(num_selected)

    def commit(self) -> dict[str, float]:
        """Free the slots of the groups that were taken: they are used up, and the weights published.

        Returns:
            Metrics of how the tasks of groups are chosen.
        """
        metrics = self._plan.record_results([*self._taken.values()])
        self._taken, self._num_dropped = {}, 0
        self._progress.num_groups = self.num_requested - len(self._waiting)
        self.request()
        return metrics

    # -- what a checkpoint holds ---------------------------------------------------------------------

    def state(self) -> StreamState:
        """Rollouts that are finished and not trained on yet, and those that are under way."""
        kept = [*self._taken.values(), *self._put_back.values()]
        here = [each for group in kept for each in group.rollouts]
        # Those of evaluations have names that are no numbers.
        here += [each for each in self._source.finished() if each.rollout_id.partition("/")[0].isdigit()]
        there = {trajectory.rollout_id for trajectory in here}
        requested = [
            request.rollout_id
            for each in self._uncommitted()
            for request in self._plan.requests(each.number, 0)
        ]
        return StreamState(
            ready=tuple(here), in_flight=tuple(each for each in requested if each not in there)
        )

    def _uncommitted(self) -> list[RequestedGroup]:
        return sorted([*self._taken, *self._waiting], key=lambda each: each.number)


def _number(rollout_id: str) -> int:
    return int(rollout_id.partition("/")[0])
