"""The groups to train on, one after the other, while the next ones are being rolled out."""

from __future__ import annotations

from collections.abc import Callable

from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from environments.types import Trajectory, TrajectoryGroup
from launch.run_folder.checkpoint import StreamState
from launch.training.recording import RecordedStream
from launch.training.rollout_requests import group_name

MakeRequests = Callable[[int, int], list[RolloutRequest]]
"""The requests of a group, from its number and the oldest policy version that may sample for it."""


class GroupScheduler:
    """Keeps a bounded number of groups on their way and hands them out in the order of the tasks.

    A group takes a slot when it is requested and gives it back when it is dropped, or when the weights that
    it trained are published. There are (max_staleness + 1) * groups_per_step slots. A group that is requested
    under version v therefore has fewer than that many before it, is trained on by the update of version
    v + max_staleness at the latest, and no token of it is older than v: that is what bounds staleness. And
    because the order is that of the tasks, not of their ends, what an update is made of depends on
    no clock, and long rollouts are not put off in favour of short ones.

    Args:
        stream: where groups are requested and come back.
        make_requests: a function of a group's number and a version.
        num_slots: groups on their way or in training.
        first: number of the first group: how many were taken before, trained on or dropped.
    """

    def __init__(
        self,
        stream: TrajectoryStream | RecordedStream,
        make_requests: MakeRequests,
        num_slots: int,
        first: int,
    ) -> None:
        self._stream = stream
        self._make_requests = make_requests
        self._num_slots = num_slots
        self._committed = first
        self._next_taken = first
        self._next_requested = first
        self._num_dropped = 0
        self._taken: list[TrajectoryGroup] = []

    @property
    def num_committed(self) -> int:
        """Groups that are behind us: where a resumed run begins."""
        return self._committed

    @property
    def num_requested(self) -> int:
        """Number of the next group that will be requested."""
        return self._next_requested

    def fill(self, version: int, num_wanted: int) -> None:
        """Request groups for the free slots, to be sampled by ``version`` or newer.

        Args:
            num_wanted: groups that are still to be taken; no more are requested, so that none is left over.
        """
        free = self._num_slots - self._num_held
        missing = num_wanted - (self._next_requested - self._next_taken)
        requests = [
            request
            for number in range(self._next_requested, self._next_requested + max(0, min(free, missing)))
            for request in self._make_requests(number, version)
        ]
        if requests:
            self._stream.request(requests)
            self._next_requested += min(free, missing)

    def take(self) -> TrajectoryGroup:
        """The next group, once it is complete.

        Raises:
            RayActorError, or the fleet's own error: no process is left that could deliver it.
        """
        group = self._stream.take(group_name(self._next_taken))
        self._next_taken += 1
        self._taken.append(group)
        return group

    def put_back(self) -> None:
        """Have the groups that were taken since the last ``commit`` taken again."""
        self._stream.put_back(self._taken)
        self._next_taken = self._committed
        self._num_dropped = 0
        self._taken = []

    def drop(self) -> None:
        """Give back the slot of a group that was taken and will not be trained on."""
        self._num_dropped += 1

    def commit(self) -> None:
        """What was taken is trained on, and the weights are published: its slots are free."""
        self._committed = self._next_taken
        self._num_dropped = 0
        self._taken = []

    # -- what a checkpoint holds ---------------------------------------------------------------------

    def state(self) -> StreamState:
        """What has been rolled out and not trained on yet, and what is under way."""
        self._stream.drain()
        taken = [each for group in self._taken for each in group.rollouts]
        finished = [*taken, *(each for each in self._stream.finished() if self._is_ours(each))]
        there = {trajectory.rollout_id for trajectory in finished}
        requested = [
            request.rollout_id
            for number in range(self._committed, self._next_requested)
            for request in self._make_requests(number, 0)
        ]
        return StreamState(
            ready=tuple(finished), in_flight=tuple(each for each in requested if each not in there)
        )

    def restore(self, state: StreamState, version: int) -> None:
        """Go on where ``state`` was: what was ready is not played again, what was under way is."""
        rollouts = {each.rollout_id for each in state.ready} | set(state.in_flight)
        requests: list[RolloutRequest] = []
        while (group := self._make_requests(self._next_requested, version))[0].rollout_id in rollouts:
            requests += group
            self._next_requested += 1
        self._stream.restore(requests, state.ready)

    def _is_ours(self, trajectory: Trajectory) -> bool:
        return trajectory.rollout_id.partition("/")[0].isdigit()

    @property
    def _num_held(self) -> int:
        return self._next_requested - self._committed - self._num_dropped
