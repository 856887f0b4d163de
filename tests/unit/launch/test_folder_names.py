"""A user's folder that is named like a package of Troupe's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from environments.errors import ConfigError
from environments.named_module import load_module
from launch.console import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def said(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What Python says in ``folder``."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", ["environments", "policies", "actors"])
def test_folder_with_name_of_package_is_named_in_one_sentence(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    done = said(tmp_path, "-m", "launch.train", "recipe=guess")
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"{tmp_path / name} has the name of a package of Troupe's")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_a_module_called_launch(tmp_path, command):
    (tmp_path / "launch.py").touch()
    console = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from launch.console import run; sys.exit(run())"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "troupe").write_text(console)
    done = said(tmp_path, "bin/troupe", command)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(tmp_path / "launch.py") in done.stderr


def test_program_in_another_folder_learns_what_workers_import(tmp_path):
    (tmp_path / "actors.py").touch()
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "mine.py").write_text("from launch import AgentTrainer")
    done = said(tmp_path, "programs/mine.py")
    assert done.returncode == 1 and f"ImportError: {tmp_path / 'actors.py'} has the name" in done.stderr


def test_folder_in_which_ray_was_started_is_no_matter_to_worker(tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "__init__.py").touch()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "default_worker.py").write_text("from launch import AgentTrainer")
    assert said(tmp_path, "ray/default_worker.py").returncode == 0


def test_folder_without_python_is_no_matter(tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "levels.json").touch()
    assert said(tmp_path, "-m", "launch.train", "--help").returncode == 0


def test_module_in_a_folder_that_troupe_hides_is_an_error():
    with pytest.raises(ConfigError, match="environments is a package of Troupe's, which hides a folder"):
        load_module("workload='environments.maze'", "environments.maze")
