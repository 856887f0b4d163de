"""The cluster that a run starts for itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from actors.ray_tools import connect
from environments.errors import ConfigError, TroupeError
from launch.cluster import session
from launch.health.heartbeat import RunHeartbeat
from launch.settings.compose import compose

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_thread_that_outlives_the_run_starts_no_second_cluster() -> None:
    # In a process of its own: Ray reads this once, when it is imported. It has no cluster, as after the end.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_AUTO_CONNECT"}
    late = subprocess.run(
        [sys.executable, "-c", "import launch, ray; ray.put(1)"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )

    assert late.returncode == 1
    assert "Ray has not been started yet" in late.stderr


def test_ray_that_does_not_start_in_time_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen ...")

    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "init", init)
    with pytest.raises(TroupeError, match="Ray did not start on this machine: The current node timed out"):
        connect.connect(1)


@pytest.mark.slow
def test_child_that_nobody_has_waited_for_does_not_disturb_end() -> None:
    # In a process of its own: it ends the Ray of its process, which here is everybody's.
    script = """
import subprocess, time
from launch.cluster import session
child = subprocess.Popen(["true"])
while open(f"/proc/{child.pid}/stat").read().split()[2] != "Z":
    time.sleep(0.01)
session.end()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr


def test_cluster_that_is_gone_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        noted = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(connect, "read_ray_address", lambda: noted)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        connect.check_answers()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+.*refused.*`ray stop`"):
        connect.check_answers()
    for other in ("local", "auto", "ray://nowhere:10001"):
        monkeypatch.setenv("RAY_ADDRESS", other)
        connect.check_answers()


def test_what_others_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["learner.num_workers=2", "server.num_replicas=2", "server.engine.num_gpus=1"])
    free = {"CPU": 64.0, "GPU": 2.0}
    monkeypatch.setattr(connect.ray, "available_resources", lambda: free)
    assert "on one node" in session.shortage(config)
    free["GPU"] = 1.0
    assert session.shortage(config) == "2 Ray GPUs, of which 1 are free"
    del free["GPU"]  # as Ray says it
    assert "of which 0 are free" in session.shortage(config)
    assert session.amount(0.04, "node") == "0.04 of the resource 'node'", "and no Ray nodes"


def test_room_is_held_by_other_live_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    here = RunHeartbeat(
        folder="here",
        pid=os.getpid(),
        host=socket.gethostname(),
        fleets=(),
        activity="starts",
        seconds=0,
        idle_seconds=0,
        num_updates=0,
        progress={},
        sent_at=time.time(),
    )
    killed = replace(here, folder="killed", pid=1, sent_at=time.time() - 3600)
    in_a_container = replace(here, folder="in a container", host="another")  # with the same number by chance
    monkeypatch.setattr(session, "run_heartbeats", lambda: [here, killed, in_a_container])
    assert session.others() == "others here are in a container"
    monkeypatch.setattr(session, "run_heartbeats", lambda: [here, killed])
    assert session.others() == "`ray status` shows who has them"


@pytest.mark.parametrize(("address", "joins"), [("local", False), ("auto", True), ("10.0.0.1:6379", True)])
def test_address_says_whether_a_cluster_is_joined(
    monkeypatch: pytest.MonkeyPatch, address: str, joins: bool
) -> None:
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert connect.joins_cluster() is joins


def test_only_a_cluster_that_is_there_already_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(**options: object) -> None:
        calls.append(options)
        raise ValueError("Ray component metrics_export is trying to use a port number that is used")

    monkeypatch.setattr(connect, "RAYLET_ENVIRONMENT", {})  # which would stay in the environment of all tests
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "init", refuse)

    with pytest.raises(ValueError, match="port number"):
        session.connect()
    assert len(calls) == 1
