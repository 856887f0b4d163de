"""How messages name a command to a person."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from environments.command_name import command_name


def test_command_of_installed_troupe_is_named_as_shell_finds_it(tmp_path, monkeypatch):
    program = tmp_path / "troupe"
    program.touch()
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert command_name("view") == "troupe view"


def test_command_of_checkout_is_named_with_python_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/somewhere/python")
    assert command_name("view") == "python -m launch.view"
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / ".venv" / "bin" / "python"))
    assert command_name("view") == ".venv/bin/python -m launch.view"
