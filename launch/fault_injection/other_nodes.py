"""The processes of a cluster's other nodes, and blows to them: for ``launch.chaos storm --address``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_tools.connect import join
from launch.fault_injection.storm import CUT, CUT_SECONDS, Blow
from launch.health.members import Member, members

ANSWER_SECONDS = 5.0
"""What a node gets to say what runs on it; one that says nothing is struck by nothing meanwhile."""
START_SECONDS = 30.0
"""What it gets for its first answer, when the process that gives it starts."""


@ray.remote(num_cpus=0)
class Striker:
    """Looks at the processes of its node, and strikes them."""

    def __init__(self, node: str) -> None:
        self._node, self._raylet = node, psutil.Process(os.getppid())

    def present(self) -> list[Member]:
        """Those with a role that live below this node's raylet, and the raylet itself."""
        return [Member(each.role, each.pid, each.stopped, self._node) for each in members(self._raylet.pid)]

    def fall(self, blow: Blow) -> None:
        """Strike; return when it is over."""
        if blow.deed != CUT:
            blow.fall()
            return
        family = [self._raylet, *self._raylet.children(recursive=True)]
        others = [each for each in family if each.pid != os.getpid()]
        _for_all(others, psutil.Process.suspend)
        try:
            time.sleep(CUT_SECONDS)
        finally:
            _for_all(others, psutil.Process.resume)


def _for_all(processes: list[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            do(process)


class OtherNodes:
    """All nodes of the cluster at ``address`` but the one of this process, also those that come later.

    Raises:
        ConfigError: the cluster does not answer.
    """

    def __init__(self, address: str) -> None:
        join(address)
        self._own = ray.get_runtime_context().get_node_id()
        self._strikers: dict[str, ray.actor.ActorHandle] = {}

    def present(self) -> list[Member]:
        """Processes with a role, of the nodes that answer."""
        seconds = dict.fromkeys(self._strikers, ANSWER_SECONDS)
        for node in (each["NodeID"] for each in ray.nodes() if each["Alive"]):
            if node not in self._strikers and node != self._own:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                self._strikers[node] = Striker.options(scheduling_strategy=where).remote(node)  # type: ignore[attr-defined]
                seconds[node] = START_SECONDS
        asked = {node: striker.present.remote() for node, striker in self._strikers.items()}
        found: list[Member] = []
        for node, answer in asked.items():
            try:
                found += ray.get(answer, timeout=seconds[node])
            except GetTimeoutError:  # it is silent
                pass
            except RayError:  # it is gone
                del self._strikers[node]
        return found

    def strike(self, blow: Blow) -> None:
        """Have it done where it is meant for. A node that is lost meanwhile is left alone."""
        with suppress(RayError):
            ray.get(self._strikers[blow.member.node].fall.remote(blow))
