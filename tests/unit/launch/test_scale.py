"""The number of rollout actors, changed by hand and by the load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from conftest import wait_until
from ray.util.queue import Queue

from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import RolloutLimits
from actors.rollouts.scaling import TO_GROW, ScalingPolicy
from actors.rollouts.service import NAMESPACE
from actors.serving.policy_app import PolicyApp
from actors.serving.replicas import policy_servers
from actors.settings import FleetConfig, ServerConfig
from actors.weights.store import WeightStore
from environments.errors import ConfigError
from launch import scale
from launch.recipes.calculator import workload
from launch.settings.compose import compose
from launch.training.update_report import scale as follow_the_load
from launch.validation.settings import check_training_settings
from policies.settings import EngineConfig

ROOT = Path(__file__).resolve().parents[3]
SLOW = {
    "time/wait": 9.0,
    "time/step": 10.0,
    "time/fleet_idle": 0.1,
    "time/requests_waiting": 12.0,
    "stream/actors": 4.0,
    "time/actors_ready": 4.0,
}


class Run:
    """The parts of a run that scaling has to do with."""

    def __init__(self, smallest: int, largest: int) -> None:
        self.scaling = ScalingPolicy(smallest, largest)
        self.said: list[str] = []
        self.sizes: list[int] = []
        self.tracker = SimpleNamespace(announce=self.said.append)
        self.rollouts = SimpleNamespace(resize=self.sizes.append)


@pytest.mark.parametrize(("largest", "sizes"), [(4, []), (5, [5]), (64, [16])])
def test_a_learner_that_waits_gets_more_actors_and_the_run_says_why(largest: int, sizes: list[int]) -> None:
    run: Any = Run(4, largest)
    for _ in range(TO_GROW):
        follow_the_load(run, SLOW)
    assert run.sizes == sizes
    assert len(run.said) == len(sizes)
    assert all("waited for 90% of the update, 12.0 requests" in each for each in run.said)


def test_a_number_that_was_set_by_hand_stays_where_the_load_decides_nothing() -> None:
    run: Any = Run(4, 4)
    for _ in range(9):
        follow_the_load(run, SLOW | {"stream/actors": 64.0})
    assert run.sizes == []


@pytest.mark.parametrize("bounds", ["fleet.min_actors=17", "fleet.max_actors=15"])
def test_bounds_that_exclude_the_number_at_the_start_are_an_error(bounds: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.num_actors=16 .* fleet\.min_actors"):
        check_training_settings(compose(["recipe=calculator", "fleet.num_actors=16", bounds]))


def test_the_fleet_that_is_meant_has_to_be_clear() -> None:
    assert scale.chosen("--fleet", ["fleet-a"], None) == "fleet-a"
    assert scale.chosen("--fleet", ["fleet-a", "fleet-b"], "fleet-b") == "fleet-b"
    for present, name in ((["fleet-a", "fleet-b"], None), (["fleet-a"], "fleet-c")):
        with pytest.raises(ConfigError, match="--fleet"):
            scale.chosen("--fleet", present, name)
    with pytest.raises(ConfigError, match="No run is going on in this cluster"):
        scale.chosen("--fleet", [], None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--actors", "0"],
        ["--fleet", "fleet-a"],
        ["--actors", "many"],
        ["--replicas", "0"],
        ["--server", "policy-a", "--actors", "2"],
    ],
)
def test_half_a_command_changes_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(arguments)
    assert ended.value.code == 2


@pytest.mark.engine
def test_a_running_fleet_is_listed_and_resized_from_another_program(ray_cluster: None) -> None:
    fleet = RolloutFleet.options(name="fleet-of-a-test", namespace=NAMESPACE).remote(  # type: ignore[attr-defined]
        workload(0).pair, None, Queue(), RolloutLimits(), FleetConfig(num_actors=1)
    )
    ray.get(fleet.resize.remote(1))
    done = run_scale("--actors", "3", "--fleet", "fleet-of-a-test")
    assert done.returncode == 0, done.stderr
    assert "fleet-of-a-test: 3 actors" in done.stdout
    assert ray.get(fleet.status.remote()).num_actors == 3
    ray.kill(fleet)


@pytest.mark.engine
def test_the_replicas_of_a_running_server_are_listed_and_their_number_is_changed(
    serve_port: int, tiny_model: Path
) -> None:
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options={"replies": ["1"]})
    by_hand, by_load = ServerConfig(engine=engine), ServerConfig(engine=engine, max_replicas=2)
    for name, config in (("by-hand", by_hand), ("by-load", by_load)):
        app = PolicyApp(name, str(tiny_model), config, WeightStore.remote())
        app.start()
        try:
            done = run_scale("--replicas", "2", "--server", name)
            if config is by_load:
                assert done.returncode == 2 and "server.max_replicas" in done.stderr
                continue
            assert done.returncode == 0 and "by-hand: replicas " in done.stdout, done.stderr
            wait_until(lambda: policy_servers()["by-hand"] == {"RUNNING": 2})
            assert run_scale("--replicas", "1", "--server", name).returncode == 0
            wait_until(lambda: policy_servers()["by-hand"] == {"RUNNING": 1})
        finally:
            app.stop()


def run_scale(*options: str) -> subprocess.CompletedProcess[str]:
    """The command, for the cluster of the tests."""
    command = [sys.executable, "-m", "launch.scale", "--address", ray.get_runtime_context().gcs_address]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)
