"""Nodes that an autoscaler adds for a run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from environments.errors import ConfigError
from launch.cluster import session
from launch.settings.compose import compose

ROOT = Path(__file__).parents[3]


def test_without_time_to_wait_run_that_does_not_fit_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.ray, "cluster_resources", lambda: {"CPU": 1.0})
    said: list[str] = []
    with pytest.raises(
        ConfigError, match=r"needs .* Ray CPUs and the cluster has 1: add nodes, or lower .*num_"
    ):
        session.wait_for_nodes(compose(["recipe=calculator"]), said.append)
    assert said == []


def test_run_starts_grows_and_shrinks_with_nodes_of_autoscaler(tiny_model: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("autoscaled.py")), str(tiny_model)]
    # As for other clusters of tests: noted where nobody looks, in a folder whose name is short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "RAY_TMPDIR": folder,
            # The shared Ray of the tests asks for a token, and has set this variable to say so.
            "RAY_AUTH_MODE": "disabled",
        }
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
