"""A cluster whose autoscaler adds nodes of this machine: a run waits for them.

    python tests/launch/autoscaled.py             waits for what a run needs
    python tests/launch/autoscaled.py --train     makes the run, too

Ray's provider of fake nodes starts a raylet for each; they never leave, since the autoscaler knows nodes by
their addresses, and these have the same. A program of its own: the tests have another cluster.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from launch.config import TrainConfig, compose
from launch.process import cluster

ROOT = Path(__file__).resolve().parents[2]
HEAD_CPUS, NODE_CPUS = 1, 3
RUN = [
    "recipe=calculator",
    "run.num_steps=2",
    "warm_start.num_steps=10",
    "evaluation.num_tasks=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "fleet.num_actors=3",
    "fleet.num_cpus_per_actor=1",  # with the learner's and half a one of the engine: four and a half
    "learner.mini_batch_size=8",
    "run.node_wait_seconds=90",
]


@contextmanager
def autoscaled_cluster(folder: Path) -> Iterator[str]:
    """The address of a cluster that has a head, and may get two nodes more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    kinds = {
        "ray.head.default": {"resources": {"CPU": HEAD_CPUS}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": NODE_CPUS},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    }
    config = {
        "cluster_name": "autoscaled",
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
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
    (folder / "autoscaling.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"]
    command += [f"--num-cpus={HEAD_CPUS}", f"--autoscaling-config={folder / 'autoscaling.json'}"]
    fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled"}
    subprocess.run([*command, f"--temp-dir={folder}/ray"], env=os.environ | fake, check=True)
    try:
        yield address
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(str(folder) in word for word in process.cmdline()):
                    process.kill()


def num_cpus() -> float:
    return float(ray.cluster_resources().get("CPU", 0))


def waits_for_nodes(config: TrainConfig) -> None:
    said: list[str] = []
    start = time.monotonic()
    cluster.wait_for_nodes(config, said.append)
    print(said, f"{time.monotonic() - start:.1f} s, {num_cpus():g} CPUs")
    assert len(said) == 1 and "The run needs 4.5 Ray CPUs and the cluster has 1." in said[0]
    assert num_cpus() >= 5


def trains() -> None:
    command = [sys.executable, "-m", "launch.train", *RUN]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, f"run.directory={folder}/run"], cwd=ROOT, capture_output=True, text=True
        )
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "Waiting for nodes" in done.stdout and "step    2/2" in done.stdout
    assert num_cpus() >= 5


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, autoscaled_cluster(Path(folder)) as address:
        os.environ["RAY_ADDRESS"] = address
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        try:
            assert num_cpus() == HEAD_CPUS
            trains() if "--train" in sys.argv else waits_for_nodes(compose(RUN))
        finally:
            ray.shutdown()  # before its cluster, which it would wait for


if __name__ == "__main__":
    main()
