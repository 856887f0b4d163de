"""A fleet on a head and two further nodes: one falls silent, one is lost and one comes.

Run by test_several_nodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil
import ray
from machine import wait_until
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.ray_tools.placement import beside_driver
from actors.rollouts.fleet import DRAIN_POLL_SECONDS, RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from environments import BaseEnv
from environments.types import Trajectory
from policies import GameAgent
from policies.sampler import ScriptedSampler

NUM_ACTORS = 6
PREEMPTION = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


class WhereEnvironment(BaseEnv):
    """One short step, whose info says on which node it was played."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"question": "Where are we?"}, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(0.5)
        return "", 1.0, True, {"node": ray.get_runtime_context().get_node_id()}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> WhereEnvironment:
        return WhereEnvironment()


def main() -> None:
    os.environ.update(RAYLET_ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    first, second = cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)
    stream = TrajectoryStream(capacity=64)
    sampler = SamplerActor.options(**beside_driver()).remote(partial(ScriptedSampler, ["Here."]))
    fleet = RolloutFleet.options(**beside_driver()).remote(
        Pair(agent_class=GameAgent, env_class=WhereEnvironment),
        sampler,
        stream.queue.actor,
        RolloutLimits(),
        FleetConfig(num_actors=NUM_ACTORS),
    )
    stream.connect(fleet)
    ray.get(fleet.resize.remote(NUM_ACTORS))

    def order(name: str, count: int) -> None:
        requests = [
            RolloutRequest(rollout_id=f"{name}/{index}", group_id=name, task={}) for index in range(count)
        ]
        ray.get(fleet.submit.remote(requests))

    def nodes_of(name: str) -> set[str]:
        """Nodes on which a group is played, of which no rollout may fail."""
        order(name, 2 * NUM_ACTORS)
        played = list(stream.trajectories(2 * NUM_ACTORS))
        assert not any(each.failed for each in played), [each.error for each in played]
        return nodes(played)

    while ray.get(fleet.status.remote()).num_ready < NUM_ACTORS:
        time.sleep(0.1)
    assert len(nodes_of("all")) == 3, "pairs are spread"
    wait_until(lambda: has_probe(first) and has_probe(second))

    order("one is silent", 4 * NUM_ACTORS)
    played = list(stream.trajectories(NUM_ACTORS // 2))
    with stopped(second):
        begin = time.monotonic()
        played += stream.trajectories(4 * NUM_ACTORS - len(played))
        assert time.monotonic() - begin < 50, "Ray takes more than a minute"
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        assert second.node_id in alive, "Ray does not know yet"
    while ray.get(fleet.status.remote()).num_ready < NUM_ACTORS:
        time.sleep(0.1)
    assert stream.queue.empty(), "what comes late from there is not counted"
    assert sorted(each.rollout_id for each in played) == sorted(
        f"one is silent/{index}" for index in range(4 * NUM_ACTORS)
    ), "each once"
    assert not any(each.failed for each in played), [each.error for each in played]

    order("one is lost", 4 * NUM_ACTORS)
    played = list(stream.trajectories(NUM_ACTORS // 2))
    cluster.remove_node(first, allow_graceful=False)
    played += stream.trajectories(4 * NUM_ACTORS - len(played))
    assert sorted(each.rollout_id for each in played) == sorted(
        f"one is lost/{index}" for index in range(4 * NUM_ACTORS)
    ), "each once"
    assert not any(each.failed for each in played), [each.error for each in played]

    ray.get(fleet.status.remote())  # raises if one of the fleet's tasks has died

    drain(cluster, second.node_id)
    time.sleep(2 * DRAIN_POLL_SECONDS)
    wait_until(lambda: second.node_id not in nodes_of(f"at {time.monotonic()}"), 60)
    assert second.node_id not in nodes_of("one is about to leave"), "no new work"

    cluster.remove_node(second, allow_graceful=False)
    anew = cluster.add_node(num_cpus=2)
    assert nodes_of("only the head and a new one") <= {ray.get_runtime_context().get_node_id(), anew.node_id}
    ray.shutdown()
    cluster.shutdown()


def has_probe(node: Any) -> bool:
    """Whether the process is up by which the fleet notices that a node has fallen silent."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in raylet.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if process.cmdline()[0].startswith("ray::NodeProbe"):
                return True
    return False


@contextmanager
def stopped(node: Any) -> Iterator[None]:
    """All processes of a node stand still, as if its network were cut."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    processes = [raylet, *raylet.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it was lost meanwhile
                process.resume()


def drain(cluster: Cluster, node_id: str) -> None:
    """Tell Ray that a node leaves in ten minutes."""
    deadline = int((time.time() + 600) * 1000)
    accepted, why_not = GcsClient(address=cluster.address).drain_node(
        node_id, PREEMPTION, "The machine is wanted back.", deadline
    )
    assert accepted, why_not


def nodes(trajectories: list[Trajectory]) -> set[str]:
    return {each.steps[-1].info["node"] for each in trajectories}


if __name__ == "__main__":
    sys.exit(main())
