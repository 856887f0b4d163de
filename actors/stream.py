"""The bounded queue between the fleet and whoever consumes trajectories."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence

import ray
from ray.util.queue import Empty, Queue

from actors.rollout import RolloutOrder
from environments.types import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
START_SECONDS = 60.0
"""After this long without any rollout actor, something is said."""
WHY_NOT = (
    "the cluster may have no CPUs or memory left for them (`ray status` shows it), or the modules of the "
    "agent and the environment may take long to import."
)
ASKED_IN_ADVANCE = 4
"""Trajectories asked of the queue before they are there, so that nobody waits for its answers in turn."""


class TrajectoryStream:
    """Trajectories as they finish, and groups as they are complete.

    The queue holds at most ``capacity`` trajectories: a fleet that is ahead of its consumer waits.
    """

    def __init__(self, capacity: int) -> None:
        self.queue = Queue(maxsize=capacity, actor_options={"num_cpus": 0})

    def trajectories(self, count: int, fleet: ray.actor.ActorHandle) -> Iterator[Trajectory]:
        """The next ``count`` trajectories in the order in which they finish.

        Has to be read to its end: a few trajectories are always asked for in advance.

        Raises:
            RayActorError, or the fleet's own error: nobody is left who could deliver.
        """
        asked: list[ray.ObjectRef] = []
        patience = START_SECONDS / POLL_SECONDS
        while count:
            while len(asked) < min(count, ASKED_IN_ADVANCE):
                asked.append(self.queue.actor.get.remote(POLL_SECONDS))
            first = asked.pop(0)  # they are answered in the order in which they were asked
            try:
                yield ray.get(first)
            except Empty:
                status = ray.get(fleet.status.remote())  # raises where it would be waited for ever
                patience -= not status.num_ready
                if patience == 0:
                    logger.warning("Of %d rollout actors none is up yet: %s", status.num_actors, WHY_NOT)
            else:
                count -= 1

    def groups(
        self, orders: Sequence[RolloutOrder], fleet: ray.actor.ActorHandle
    ) -> Iterator[TrajectoryGroup]:
        """The groups that ``orders`` belong to, each as soon as its last trajectory is there."""
        sizes: dict[str, int] = defaultdict(int)
        group_of: dict[str, str] = {}
        for order in orders:
            sizes[order.group_id] += 1
            group_of[order.rollout_id] = order.group_id
        members: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in self.trajectories(len(orders), fleet):
            group_id = group_of[trajectory.rollout_id]
            members[group_id].append(trajectory)
            if len(members[group_id]) == sizes[group_id]:
                trajectories = sorted(members.pop(group_id), key=lambda each: each.rollout_id)
                yield TrajectoryGroup(
                    group_id=group_id, task=trajectories[0].task, trajectories=tuple(trajectories)
                )

    def close(self) -> None:
        """End the queue's actor."""
        self.queue.shutdown(force=True)
