"""The bounded queue between the fleet and the consumer of trajectories."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import ray
from ray.exceptions import RayActorError

from actors.ray_tools.calls import get_or_raise
from actors.ray_tools.placement import beside_driver, start_actor
from actors.rollouts.fleet_report import NoActorWarning
from actors.rollouts.rollout import RolloutRequest
from environments.background import in_background
from environments.regrading import needs_comparison, regraded_group, unjudged_group
from environments.rewards.base import GroupReward
from environments.types import Trajectory, TrajectoryGroup

STREAM_POLL_SECONDS = 1.0
JUDGEMENT_POLL_SECONDS = 0.05
DRAIN_SECONDS = 1.0
"""Most seconds that emptying the queue may take; if nothing comes for a tenth of it, it is empty."""
CALLS_IN_ADVANCE = 2
"""Calls for trajectories that wait at the queue at the same time."""
MAX_TAKEN = 64
"""Trajectories that one such call takes at most."""
BASELINE = "greedy"
"""The member of a group that is rolled out greedily, for the algorithms that compare with it."""


class GroupJudgement:
    """Has complete groups judged by a ``GroupReward``, in threads, while others are still played."""

    def __init__(self, reward: GroupReward) -> None:
        self._reward = reward
        self._waiting: deque[TrajectoryGroup] = deque()
        self._under_way: list[Future[TrajectoryGroup]] = []

    @property
    def is_under_way(self) -> bool:
        """Return whether any group is being judged."""
        return bool(self._under_way)

    def request(self, group: TrajectoryGroup) -> None:
        """Have ``group`` judged when its turn comes."""
        self._waiting.append(group)

    def finished(self) -> list[TrajectoryGroup]:
        """The groups that have been judged since the last call; others begin in their places."""
        over = [each for each in self._under_way if each.done()]
        self._under_way = [each for each in self._under_way if each not in over]
        while self._waiting and len(self._under_way) < self._reward.concurrency:
            work = partial(judged_group, self._waiting.popleft(), self._reward)
            self._under_way.append(in_background(work, "judgement"))
        return [each.result() for each in over]


def judged_group(group: TrajectoryGroup, reward: GroupReward) -> TrajectoryGroup:
    """``group`` with its verdicts; all of it has failed where there is one missing. What was judged before a
    checkpoint stays, unless a member that had failed was played again.
    """
    if not any(map(needs_comparison, group.rollouts)):
        return group
    try:
        return regraded_group(group, reward)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # it may be the user's own code
        return unjudged_group(group, "".join(traceback.format_exception(error)))


@ray.remote(num_cpus=0)
class TrajectoryQueue:
    """Trajectories that have ended, at most ``capacity`` of them. A call brings or takes several, since Ray's
    part of it costs more than a trajectory.
    """

    def __init__(self, capacity: int) -> None:
        self._queue: asyncio.Queue[Trajectory] = asyncio.Queue(capacity)

    async def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Store them all; returns when there was room for the last."""
        for each in trajectories:
            await self._queue.put(each)

    async def get(self) -> list[Trajectory]:
        """The next ones, as soon as there is one."""
        taken = [await self._queue.get()]
        while len(taken) < MAX_TAKEN and not self._queue.empty():
            taken.append(self._queue.get_nowait())
        return taken

    async def qsize(self) -> int:
        """Return how many wait here."""
        return self._queue.qsize()


class TrajectoryStream:
    """Trajectories as they finish, and groups when they are complete.

    The queue holds at most ``capacity`` trajectories: a fleet that is ahead of its consumer waits. Connect
    the fleet before anything is taken: its status shows what holds it up when nothing comes.

    Args:
        before_wait: called before a group is waited for.
        group_reward: judges each group before it counts as complete.
    """

    def __init__(
        self,
        capacity: int,
        before_wait: Callable[[], None] | None = None,
        group_reward: GroupReward | None = None,
    ) -> None:
        self._before_wait = before_wait
        self._judgement = None if group_reward is None else GroupJudgement(group_reward)
        self.queue = start_actor(TrajectoryQueue, capacity, **beside_driver())
        self._fleet: ray.actor.ActorHandle | None = None
        self._checks: list[Callable[[], None]] = []
        self._calls: list[ray.ObjectRef] = []
        self._taken: deque[Trajectory] = deque()
        """Trajectories that have come with others, in their order."""
        self._no_actor = NoActorWarning()
        self._groups: dict[str, dict[str, Trajectory | None]] = {}
        """Trajectories of each group that was requested, by their rollout ids; ``None`` until they come."""
        self._complete: set[str] = set()
        """Groups of these of which all trajectories are there, and judged where they are compared."""
        self.last_arrival: float | None = None
        """Time when a trajectory last came; ``None`` before the first."""

    def connect(self, fleet: ray.actor.ActorHandle) -> None:
        """Take trajectories from ``fleet`` from now on."""
        self._fleet = fleet

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` about once a second while nothing comes: an error that it raises ends the wait."""
        self._checks.append(check)

    def trajectories(self, count: int) -> Iterator[Trajectory]:
        """The next ``count`` trajectories, about in the order in which they finish.

        Raises:
            RayActorError, or the fleet's own error: no process is left that could deliver.
        """
        for _ in range(count):
            yield self._next()

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        """Have ``requests`` rolled out, except those that are ``finished`` already: a resumed run plays
        nothing twice. All requests of a group have to come in the same call.

        A rollout is played again with all that fork from it, unless all of them are finished: only it has
        the state of the environment with which they begin.
        """
        there = {trajectory.rollout_id: trajectory for trajectory in finished}
        incomplete = {_root(request) for request in requests if request.rollout_id not in there}
        for request in requests:
            trajectory = None if _root(request) in incomplete else there[request.rollout_id]
            if trajectory is not None:
                trajectory.task = request.task  # the run's own, not what a file has kept of it
            self._groups.setdefault(request.group_id, {})[request.rollout_id] = trajectory
        for group_id in {request.group_id for request in requests}:
            self._note_if_complete(group_id)
        self._send([request for request in requests if _root(request) in incomplete])

    def take(self, *group_ids: str) -> TrajectoryGroup:
        """The first of the groups ``group_ids`` that is complete. Raises as ``trajectories`` does.

        Args:
            group_ids: the one to prefer first, where several are complete.
        """
        wanted = set(group_ids)
        assert wanted and wanted <= self._groups.keys(), f"request() comes first: {group_ids}"
        complete = self._first_complete(group_ids)
        if complete is None and self._before_wait is not None:
            self._before_wait()
        checked = time.monotonic()
        while complete is None:
            if self._judgement is None or not self._judgement.is_under_way:
                self._keep(self._next())
            elif (trajectory := self._arrived(JUDGEMENT_POLL_SECONDS)) is not None:
                self._keep(trajectory)
            elif time.monotonic() - checked > STREAM_POLL_SECONDS:
                self._check_fleet()
                checked = time.monotonic()
            complete = self._first_complete(group_ids)
        self._complete.remove(complete)
        return _group(complete, self._groups.pop(complete))

    def groups(self, requests: Sequence[RolloutRequest]) -> Iterator[TrajectoryGroup]:
        """Have ``requests`` rolled out; their groups, each as soon as it is complete.

        After an error it may be called again with the same requests: those that are under way or there
        already are not sent once more.
        """
        self.request([request for request in requests if request.group_id not in self._groups])
        waiting = dict.fromkeys(request.group_id for request in requests)
        while waiting:
            group = self.take(*waiting)
            del waiting[group.group_id]
            yield group

    def finished(self) -> list[Trajectory]:
        """Trajectories that are here or in the queue, and were not taken yet. For a checkpoint.

        Quiet about a queue that has died: what it held is played again, and the next ``take`` raises.
        """
        deadline = time.monotonic() + DRAIN_SECONDS
        with suppress(RayActorError):
            while (self._taken or time.monotonic() < deadline) and (
                trajectory := self._arrived(DRAIN_SECONDS / 10)
            ):
                self._keep(trajectory)
        return [each for members in self._groups.values() for each in members.values() if each is not None]

    def close(self) -> None:
        """End the queue's actor."""
        ray.kill(self.queue)

    # -- the queue -----------------------------------------------------------------------------------

    def _send(self, requests: Sequence[RolloutRequest]) -> None:
        assert self._fleet is not None, "connect() comes first"
        get_or_raise([self._fleet.submit.remote(list(requests))], "The fleet")

    def _note_if_complete(self, group_id: str) -> None:
        if None in self._groups[group_id].values():
            return
        if self._judgement is None:
            self._complete.add(group_id)
        else:
            self._judgement.request(_group(group_id, dict(self._groups[group_id])))

    def _first_complete(self, group_ids: Sequence[str]) -> str | None:
        for group in () if self._judgement is None else self._judgement.finished():
            self._groups[group.group_id] = {each.rollout_id: each for each in group.rollouts}
            self._complete.add(group.group_id)
        return next(filter(self._complete.__contains__, group_ids), None)

    def _keep(self, trajectory: Trajectory) -> None:
        group_id, _, _ = trajectory.rollout_id.rpartition("/")
        self._groups[group_id][trajectory.rollout_id] = trajectory
        self._note_if_complete(group_id)

    def _next(self) -> Trajectory:
        while (trajectory := self._arrived(STREAM_POLL_SECONDS)) is None:
            self._check_fleet()
        self._no_actor = NoActorWarning()
        return trajectory

    def _arrived(self, seconds: float) -> Trajectory | None:
        """A trajectory that is there, or comes within ``seconds``."""
        if self._taken:
            return self._taken.popleft()
        while len(self._calls) < CALLS_IN_ADVANCE:
            self._calls.append(self.queue.get.remote())
        # Any of them: the queue's actor does not begin calls in the order in which they were made. And only
        # we have a time limit: one of the queue's own would end in an error, and a line in the log, for each
        # that had no waiter.
        arrived, self._calls = ray.wait(self._calls, timeout=seconds)
        if not arrived:
            return None
        self.last_arrival = time.monotonic()
        self._taken.extend(ray.get(arrived[0]))
        return self._taken.popleft()

    def _check_fleet(self) -> None:
        """Raise where the wait would have no end, and warn where no rollout actor is up."""
        assert self._fleet is not None, "connect() comes first"
        for check in self._checks:
            check()
        status, _ = get_or_raise([self._fleet.status.remote(), self.queue.qsize.remote()], "Fleet or queue")
        self._no_actor.note(status)


def _root(request: RolloutRequest) -> str:
    return request.rollout_id if request.fork is None else request.fork.parent


def _group(group_id: str, members: dict[str, Trajectory | None]) -> TrajectoryGroup:
    baseline = members.pop(f"{group_id}/{BASELINE}", None)
    trajectories = tuple(members[rollout_id] for rollout_id in sorted(members))
    complete = tuple(each for each in trajectories if each is not None)
    assert len(complete) == len(trajectories), "a group is taken when it is complete"
    return TrajectoryGroup(group_id=group_id, task=complete[0].task, trajectories=complete, baseline=baseline)
