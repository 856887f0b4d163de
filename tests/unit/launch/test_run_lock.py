"""A run's folder belongs to one process at a time, and is one that survives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.ray_tools.job import JOB
from environments.errors import ConfigError
from launch.run_folder.lock import RunLock, run_directory

ROOT = Path(__file__).parents[3]


def elsewhere(directory: Path) -> subprocess.CompletedProcess[str]:
    """Another process that wants the folder."""
    script = (
        "import pathlib, sys; from launch.run_folder.lock import RunLock; RunLock(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)


def test_folder_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        refused = elsewhere(tmp_path)
        assert held.text.partition(" (")[0] in refused.stderr and "stop that run" in refused.stderr
        assert held.path.read_text() == held.text, "who is refused changes nothing"
    assert elsewhere(tmp_path).returncode == 0
    with RunLock(tmp_path) as later:
        assert later.text != held.text, "so an old one on another disk is told apart"


def test_job_names_a_folder_that_outlives_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_directory("~/runs/a") == tmp_path / "runs" / "a"
    assert run_directory("runs/a") == Path.cwd() / "runs" / "a"
    monkeypatch.setenv(JOB, "{}")
    assert run_directory("~/runs/a") == tmp_path / "runs" / "a"
    with pytest.raises(ConfigError, match=r"run\.directory=runs/a is inside this job's copy.*absolute path"):
        run_directory("runs/a")
