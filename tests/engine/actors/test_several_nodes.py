"""Nodes that come and go, on one machine: each has a raylet of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_pairs_are_spread_and_a_lost_node_costs_nothing() -> None:
    run("several_nodes.py")


def test_nodes_sample_for_themselves_and_share_replicas() -> None:
    run("sampling_nodes.py")


def test_what_has_settings_for_its_nodes_lives_on_such_nodes() -> None:
    run("placed_nodes.py")


def test_training_goes_on_while_its_nodes_come_and_go() -> None:
    run("lost_nodes.py")


def run(name: str) -> None:
    # A program of its own: this one has a cluster of one node already.
    program = [sys.executable, str(Path(__file__).with_name(name))]
    # Others would join its cluster, were it noted where they look. Not tmp_path: too long for sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(__file__).parent])),
            "RAY_TMPDIR": folder,
        }
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
