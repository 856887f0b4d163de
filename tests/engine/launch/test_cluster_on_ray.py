"""A run on the cluster that it starts, and on one that others have started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from head_node import RAY, head_node

ROOT = Path(__file__).parents[3]


def test_program_in_another_folder_needs_the_library_on_its_path(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import sys
sys.path.append({str(ROOT)!r})
import ray
from actors.sampling.directory import SamplerDirectory
from launch.cluster import session
session.connect()
ray.get(SamplerDirectory.remote().__ray_ready__.remote(), timeout=110)
session.end()
"""
    )
    ended = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr


def test_start_that_takes_too_long_is_tried_once_more() -> None:
    program = """
import os
import ray._private.services as services
from launch.cluster import session
from launch.health.members import members

get_node, late = services.get_node, [Exception("The current node timed out during startup.")]

def first_too_late(*arguments):
    if late:
        raise late.pop()
    return get_node(*arguments)

services.get_node = first_too_late
assert session.connect()
print([each.role for each in members(os.getpid()) if each.role in ("raylet", "gcs")])
session.end()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.stdout == "['gcs', 'raylet']\n", ended.stdout + ended.stderr


def test_job_can_be_submitted_to_a_cluster_that_starts_later(tmp_path: Path) -> None:
    local = "from launch.cluster import session; assert session.connect(); session.end()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    subprocess.run(
        [sys.executable, "-c", local],
        cwd=ROOT,
        env=environment | {"HOME": str(tmp_path)},
        check=True,
        timeout=240,
    )
    assert list(tmp_path.iterdir()) == [], "a token there would be asked for"
    with head_node(1, dashboard=True, HOME=str(tmp_path)) as joined:
        job = [*RAY, "job", "submit", "--", "echo", "the job's line"]
        done = subprocess.run(job, env=joined, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the job's line" in done.stdout
