"""The number of rollout actors and of replicas, changed while they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ray
from machine import wait_until
from ray.util.queue import Queue
from served_policy import serve_policy

from actors.ray_tools.placement import NAMESPACE
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import RolloutLimits
from actors.serving.replicas import policy_servers
from actors.settings import FleetConfig, ServerConfig
from actors.weights.store import WeightStore
from launch.recipes.calculator import workload
from policies.settings import EngineConfig

ROOT = Path(__file__).resolve().parents[3]


def test_running_fleet_is_listed_and_resized_from_outside(ray_cluster: None) -> None:
    fleet = RolloutFleet.options(name="fleet-of-a-test", namespace=NAMESPACE).remote(  # type: ignore[attr-defined]
        workload(0).pair, None, Queue().actor, RolloutLimits(), FleetConfig(num_actors=1)
    )
    ray.get(fleet.resize.remote(1))
    done = run_scale("--actors", "3", "--fleet", "fleet-of-a-test")
    assert done.returncode == 0, done.stderr
    assert "fleet-of-a-test: 3 actors" in done.stdout
    assert ray.get(fleet.status.remote()).num_actors == 3
    ray.kill(fleet)


def test_replicas_are_listed_and_their_number_is_changed(serve_port: int, tiny_model: Path) -> None:
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options={"replies": ["1"]})
    with serve_policy("by-hand", tiny_model, WeightStore.remote(), ServerConfig(engine=engine)):
        done = run_scale("--replicas", "2", "--server", "by-hand")
        assert done.returncode == 0 and "by-hand: replicas " in done.stdout, done.stderr
        wait_until(lambda: policy_servers()["by-hand"] == {"RUNNING": 2})
        assert run_scale("--replicas", "1", "--server", "by-hand").returncode == 0
        wait_until(lambda: policy_servers()["by-hand"] == {"RUNNING": 1})


def run_scale(*options: str) -> subprocess.CompletedProcess[str]:
    """The command, for the cluster of the tests."""
    command = [sys.executable, "-m", "launch.scale", "--address", ray.get_runtime_context().gcs_address]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)
