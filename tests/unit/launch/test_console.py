"""``troupe``: which commands it knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from environments.command_name import command_name
from launch.console import COMMANDS, main


def test_without_a_command_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        listed = capsys.readouterr().out
        assert all(f"\n  {name} " in listed for name in COMMANDS)


WITH_ARGPARSE = {"view", "export", "play", "status", "scale", "replay", "verify", "chaos"}
"""Commands without settings: argparse shows their help, and ends the program."""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_the_module_of_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if name in WITH_ARGPARSE else _nothing():
        assert main([name, "--help"]) == 0
    assert command_name(name) in capsys.readouterr().out


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize(("name", "hint"), [("trian", "troupe train"), ("xyz", "train, evaluate")])
def test_unknown_command_names_the_nearest(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert hint in capsys.readouterr().err
