"""A training on a head and two further nodes: one falls silent and is lost, one comes, and the one with the
learner drains and is lost.

Run by test_several_nodes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import ray
from followed_run import NODE, ROOT, FollowedRun
from machine import wait_until
from ray._private import state
from ray.cluster_utils import Cluster
from several_nodes import drain, stopped

from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from launch.cluster.session import RAY_ENVIRONMENT

LEARNER_NODE = {**NODE, "learner": 1}
STALL_SECONDS = 120.0
"""Seconds for which no update may be made, whatever becomes of a node."""


def main() -> None:
    os.environ.update(RAYLET_ENVIRONMENT | RAY_ENVIRONMENT)  # the run has none to add
    head = {"num_cpus": 2, "resources": {"head": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(log_to_driver=False, logging_level="ERROR")
    first, second = (cluster.add_node(num_cpus=5, resources=each) for each in (LEARNER_NODE, NODE))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        run = FollowedRun(Path(folder) / "run", ["fleet.num_actors=4", f"model.path={sys.argv[1]}"])
        run.wait_until(lambda: run.num_updates >= 2, 400, "two updates")
        with stopped(second):
            run.wait_for_updates(1, seconds=STALL_SECONDS)
            alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            assert second.node_id in alive, "Ray alone would have taken a minute"
            run.wait_for_updates(2)
            cluster.remove_node(second, allow_graceful=False)
        run.wait_for_updates(2, seconds=STALL_SECONDS)
        other = cluster.add_node(num_cpus=5, resources=LEARNER_NODE)
        drain(cluster, first.node_id)
        wait_until(lambda: not plays(first.node_id), STALL_SECONDS)
        run.wait_for_updates(2, seconds=STALL_SECONDS)
        assert not plays(first.node_id), "no new work"
        assert lives("LearnerWorker", first.node_id)
        cluster.remove_node(first, allow_graceful=False)
        run.wait_for_updates(3, seconds=2 * STALL_SECONDS)
        assert lives("LearnerWorker", other.node_id), "the learner goes on at another node"
        cluster.add_node(num_cpus=4, resources=NODE)
        run_storms(run, cluster.address)
        run.interrupt()
    ray.shutdown()
    cluster.shutdown()


def plays(node_id: str) -> bool:
    """Whether rollout actors live on a node."""
    return lives("RolloutActor", node_id)


def lives(class_name: str, node_id: str) -> bool:
    """Whether actors of a class live on a node."""
    return any(
        each["ActorClassName"] == class_name
        and each["State"] == "ALIVE"
        and each["Address"]["NodeID"] == node_id
        for each in state.actors().values()
    )


def run_storms(run: FollowedRun, address: str) -> None:
    """Storms of two faults, over the run's actors and the nodes that they live on, until each had a fault."""
    command = [sys.executable, "-m", "launch.chaos", "storm", f"--below={run.process.pid}"]
    command += [f"--run={run.directory}", f"--address={address}", "--every=1", "--minutes=0.04"]
    missing = {"raylet .* cut off for", "actor .* of node .* killed"}
    for seed in (8, 9, 27):  # an actor is killed, then a node cut off, unless there are none at that moment
        storm = subprocess.run(
            [*command, f"--seed={seed}", "--roles", "actor", "raylet"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        print(storm.stdout, storm.stderr)
        assert storm.returncode == 0
        missing = {fault for fault in missing if not re.search(fault, storm.stdout)}
        if not missing:
            return
    raise AssertionError(f"no such fault: {missing}")


if __name__ == "__main__":
    main()
