"""The processes of a cluster's other nodes, and faults there: for ``launch.chaos storm --address``."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.ray_tools.connect import join
from actors.ray_tools.placement import on_node, start_actor
from launch.fault_injection.fault import Fault
from launch.health.members import Member, members

LIST_SECONDS = 5.0
"""Seconds that a node gets to list its processes; one that is silent gets no fault meanwhile."""
FIRST_LIST_SECONDS = 30.0
"""Seconds for its first list, when the actor that makes it starts."""


@ray.remote(num_cpus=0)
class FaultInjector:
    """Lists the processes of its node, and injects faults there."""

    def __init__(self, node: str) -> None:
        self._node, self._raylet = node, psutil.Process(os.getppid())

    def present(self) -> list[Member]:
        """Processes with a role that live below this node's raylet, and the raylet itself."""
        return [Member(each.role, each.pid, each.stopped, self._node) for each in members(self._raylet.pid)]

    def inject(self, fault: Fault) -> None:
        """Inject ``fault`` here; return when it is over."""
        fault.inject()


class OtherNodes:
    """Nodes of the cluster at ``address`` but the one of this process, also those that come later.

    Raises:
        ConfigError: the cluster does not answer.
    """

    def __init__(self, address: str) -> None:
        join(address)
        self._own = ray.get_runtime_context().get_node_id()
        self._injectors: dict[str, ray.actor.ActorHandle] = {}

    def present(self) -> list[Member]:
        """Processes with a role, of the nodes that answer."""
        seconds = dict.fromkeys(self._injectors, LIST_SECONDS)
        for node in (each["NodeID"] for each in ray.nodes() if each["Alive"]):
            if node not in self._injectors and node != self._own:
                self._injectors[node] = start_actor(FaultInjector, node, **on_node(node))
                seconds[node] = FIRST_LIST_SECONDS
        answers = {node: injector.present.remote() for node, injector in self._injectors.items()}
        found: list[Member] = []
        for node, answer in answers.items():
            try:
                found += ray.get(answer, timeout=seconds[node])
            except GetTimeoutError:  # it is silent
                pass
            except RayError:  # it is gone
                del self._injectors[node]
        return found

    def inject(self, fault: Fault) -> None:
        """Inject ``fault`` on the node that it names. A node that is lost meanwhile is left alone."""
        with suppress(RayError):
            ray.get(self._injectors[fault.member.node].inject.remote(fault))
