"""The groups to train on, one after the other, while the next ones are being rolled out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from environments.types import TrajectoryGroup
from launch.run_folder.checkpoint import StreamState
from launch.training.group_order import GroupOrder, RequestedGroup, oldest_version
from launch.training.recording import RecordedStream
from launch.training.rollout_requests import group_name

MakeRequests = Callable[[int, int], list[RolloutRequest]]
"""The requests of a group, from its number and the oldest policy version that may sample for it."""


@dataclass(frozen=True)
class TakenGroup:
    """A group that the present update is made of, or that was dropped for it."""

    requested: RequestedGroup
    group: TrajectoryGroup


class GroupScheduler:
    """Keeps a bounded number of groups on their way and hands them out in an order.

    A group takes a slot when it is requested and gives it back when it is dropped, or when the weights that
    it trained are published. There are (max_staleness + 1) * groups_per_step slots. A group that is requested
    under version v therefore has fewer than that many before it. In the order of the tasks it is trained on
    by the update of version v + max_staleness at the latest, and no token of it is older than v: that is what
    bounds staleness. ``CompletionOrder`` says how another order keeps that bound.

    Args:
        stream: where groups are requested and come back.
        make_requests: a function of a group's number and a version.
        order: says which groups may be taken next.
        num_slots: groups on their way or in training.
        first: how many groups were taken before, trained on or dropped.
    """

    def __init__(
        self,
        stream: TrajectoryStream | RecordedStream,
        make_requests: MakeRequests,
        order: GroupOrder,
        num_slots: int,
        first: int,
    ) -> None:
        self._stream = stream
        self._make_requests = make_requests
        self._order = order
        self._num_slots = num_slots
        self._next_requested = first
        self._num_dropped = 0
        self._waiting: list[RequestedGroup] = []
        """Requested and not taken, by their numbers."""
        self._taken: list[TakenGroup] = []
        """Taken since the last ``commit``."""

    @property
    def num_committed(self) -> int:
        """Groups that are behind us, whichever they are: a resumed run takes all the others."""
        return self._next_requested - len(self._waiting) - len(self._taken)

    @property
    def num_requested(self) -> int:
        """Number of the next group that will be requested."""
        return self._next_requested

    def fill(self, version: int, num_wanted: int) -> None:
        """Request groups for the free slots, to be sampled by ``version`` or newer.

        Args:
            num_wanted: groups that are still to be taken; no more are requested, so that none is left over.
        """
        num_held = len(self._waiting) + len(self._taken) - self._num_dropped
        num_new = max(0, min(self._num_slots - num_held, num_wanted - len(self._waiting)))
        numbers = range(self._next_requested, self._next_requested + num_new)
        requests = [request for number in numbers for request in self._make_requests(number, version)]
        if requests:
            self._stream.request(requests)
        self._waiting += [RequestedGroup(number=number, version=version) for number in numbers]
        self._next_requested += num_new

    def take(self, version: int) -> TrajectoryGroup:
        """The next group, once it is complete.

        Args:
            version: of the policy that is going to learn from it.

        Raises:
            RayActorError, or the fleet's own error: no process is left that could deliver it.
        """
        num_used = len(self._taken) - self._num_dropped
        candidates = self._order.candidates(self._waiting, version, num_used)
        by_name = {group_name(each.number): each for each in candidates}
        group = self._stream.take(*by_name)
        requested = by_name[group.group_id]
        self._waiting.remove(requested)
        self._taken.append(TakenGroup(requested, group))
        return group

    def put_back(self) -> None:
        """Have the groups that were taken since the last ``commit`` taken again."""
        self._stream.put_back([each.group for each in self._taken])
        self._waiting = self._uncommitted()
        self._num_dropped = 0
        self._taken = []

    def drop(self) -> None:
        """Give back the slot of a group that was taken and will not be trained on."""
        self._num_dropped += 1

    def commit(self) -> None:
        """What was taken is trained on, and the weights are published: its slots are free."""
        self._num_dropped = 0
        self._taken = []

    # -- what a checkpoint holds ---------------------------------------------------------------------

    def state(self) -> StreamState:
        """What has been rolled out and not trained on yet, and what is under way."""
        self._stream.drain()
        taken = [each for group in self._taken for each in group.group.rollouts]
        finished = [*taken, *(each for each in self._stream.finished() if _is_ours(each.rollout_id))]
        there = {trajectory.rollout_id for trajectory in finished}
        requested = [
            request.rollout_id
            for each in self._uncommitted()
            for request in self._make_requests(each.number, 0)
        ]
        return StreamState(
            ready=tuple(finished), in_flight=tuple(each for each in requested if each not in there)
        )

    def restore(self, state: StreamState, version: int) -> None:
        """Go on where ``state`` was: what was ready is not played again, what was under way is.

        All groups were requested that are behind us or in ``state``: so the next one has the number of both
        together, also where the order of completion has left gaps between those that are behind us.
        """
        ages: dict[int, list[float]] = defaultdict(list)
        for trajectory in state.ready:
            ages[_number(trajectory.rollout_id)].append(oldest_version(trajectory))
        for rollout_id in state.in_flight:  # it is played anew
            ages[_number(rollout_id)].append(version)
        self._waiting = [
            RequestedGroup(number=number, version=int(min(version, *ages[number]))) for number in sorted(ages)
        ]
        self._next_requested += len(self._waiting)
        requests = [
            request for each in self._waiting for request in self._make_requests(each.number, version)
        ]
        if requests:
            self._stream.restore(requests, state.ready)

    def _uncommitted(self) -> list[RequestedGroup]:
        taken = [each.requested for each in self._taken]
        return sorted([*taken, *self._waiting], key=lambda each: each.number)


def _number(rollout_id: str) -> int:
    return int(rollout_id.partition("/")[0])


def _is_ours(rollout_id: str) -> bool:
    return rollout_id.partition("/")[0].isdigit()
