"""Nodes that come and go, on one machine: each has a raylet of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("program", ["several_nodes.py", "lost_nodes.py"])
def test_work_goes_on_while_nodes_come_fall_silent_and_go(program: str, tiny_model: Path) -> None:
    # A program of its own: this one has a cluster of one node already.
    command = [sys.executable, str(Path(__file__).with_name(program)), str(tiny_model)]
    # Others would join its cluster, were it noted where they look. Not tmp_path: too long for sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(__file__).parent])),
            "RAY_TMPDIR": folder,
        }
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
