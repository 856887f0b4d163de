"""A cluster whose autoscaler adds nodes of this machine for a run, and takes them away again.

Run by test_autoscaling. The run waits for the first node, since the head has no room for rollout actors;
more actors bring a second one; fewer let it go. Ray's provider of fake nodes starts a raylet for each.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
from followed_run import HEAD, NODE, SCRIPTED, FollowedRun, num_nodes
from machine import free_port
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider

from launch.scale import fleets

CPUS = 2
"""Of each node."""
SETTINGS = "autoscaling.json"
"""The autoscaler's, which it reads in each of its rounds."""


@contextmanager
def autoscaled_cluster(folder: Path) -> Iterator[str]:
    """The address of a cluster that has a head, and may get two nodes more."""
    address = f"127.0.0.1:{free_port()}"
    kinds = {
        "ray.head.default": {"resources": {"CPU": CPUS, **HEAD}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": CPUS, **NODE},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    }
    config = {
        "cluster_name": "autoscaled",
        "max_workers": 2,
        "idle_timeout_minutes": 10.0,  # a node that was added waits for the actors that are to live on it
        "provider": {
            "type": "external",  # its own name, fake_multinode, wants a file that Ray's wheel lacks
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,  # there is nothing to install on them
            "disable_launch_config_check": True,
        },
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
        "auth": {},
        "upscaling_speed": 10.0,
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    (folder / SETTINGS).write_text(json.dumps(config))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"]
    command += [f"--num-cpus={CPUS}", f"--resources={json.dumps(HEAD)}"]
    command += [f"--autoscaling-config={folder / SETTINGS}"]
    fake = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # The first version of the autoscaler knows nodes by their addresses, and these have all the same.
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
    subprocess.run([*command, f"--temp-dir={folder}/ray"], env=os.environ | fake, check=True)
    try:
        yield address
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(str(folder) in word for word in process.cmdline()):
                    process.kill()


def let_idle_nodes_go(folder: Path) -> None:
    """Have the autoscaler take away nodes that are idle for some seconds."""
    settings, changed = folder / SETTINGS, folder / "changed.json"
    changed.write_text(json.dumps(json.loads(settings.read_text()) | {"idle_timeout_minutes": 0.1}))
    changed.replace(settings)  # at once: it may be read at any time


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, autoscaled_cluster(Path(folder)) as address:
        os.environ["RAY_ADDRESS"] = address
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        try:
            assert num_nodes() == 1
            follow_a_run(Path(folder))
        finally:
            ray.shutdown()  # before its cluster, which it would wait for


def follow_a_run(folder: Path) -> None:
    """Start a run, make it larger and smaller, interrupt it, and see the nodes follow."""
    settings = [f"model.path={sys.argv[1]}", "fleet.num_actors=2", "run.node_wait_seconds=300"]
    run = FollowedRun(folder / "run", [*settings, *SCRIPTED])
    run.wait_until(lambda: run.num_updates >= 1, 400, "the first update, on a node that was added")
    assert num_nodes() == 2
    assert "Waiting for nodes" in run.said
    scale(4)
    run.wait_until(lambda: num_nodes() == 3, 240, "four actors bring a second node")
    run.wait_for_updates(2)
    scale(2)
    let_idle_nodes_go(folder)
    run.wait_until(lambda: num_nodes() == 2, 240, "two actors let it go")
    run.wait_for_updates(2)
    run.interrupt()
    run.wait_until(lambda: num_nodes() == 1, 240, "without a run the head is alone")


def scale(num_actors: int) -> None:
    """Change the number of rollout actors, as ``launch.scale`` does."""
    (fleet,) = fleets().values()
    ray.get(fleet.resize.remote(num_actors))


if __name__ == "__main__":
    main()
