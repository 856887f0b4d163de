"""What ``--help`` prints: of each command its own settings."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from environments.bounds import leaves
from environments.command_name import command_name
from launch.settings.command import WIDTH, Command
from launch.settings.tree import TrainConfig

COMMANDS: dict[str, Command] = {
    name: importlib.import_module(f"launch.{name}").COMMAND for name in ("train", "evaluate", "serve")
}
TEXTS = {name: command.help_text() for name, command in COMMANDS.items()}
TEXT = TEXTS["train"]


@pytest.mark.parametrize("command", COMMANDS)
def test_setting_of_a_command_is_shown_with_a_sentence(command: str) -> None:
    shown = dict(
        re.findall(r"^  ([\w.]+)=.*\n(?:      \s+.*\n)*((?:      .+\n)+)", TEXTS[command], re.MULTILINE)
    )
    own = [leaf.name for leaf in leaves(TrainConfig()) if COMMANDS[command].acts_on(leaf.name)]
    assert sorted(shown) == sorted(own)
    assert all(sentence.rstrip().endswith((".", "...")) for sentence in shown.values()), shown


def test_commands_list_what_they_act_on() -> None:
    assert TEXT.count("=") > 80 and "\n  run.num_steps=100" in TEXT and "\n  server.adapters=" not in TEXT
    for name in ("algorithm.name", "run.num_steps", "rollout.group_size", "learner.device", "server.weights"):
        assert not re.search(rf"\n  {re.escape(name)}[.=]", TEXTS["evaluate"] + TEXTS["serve"]), name
    assert "\n  evaluation.rollouts_per_task=1" in TEXTS["evaluate"]
    assert "\n  server.adapters={}" in TEXTS["serve"] and "recipe" in TEXTS["serve"]


@pytest.mark.parametrize("command", COMMANDS)
def test_name_that_a_command_takes_is_that_of_a_setting(command: str) -> None:
    names = {leaf.name for leaf in leaves(TrainConfig())} | {"recipe"}
    sections = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    assert {*COMMANDS[command].settings, *COMMANDS[command].left_out} <= names | sections


@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_its_help_and_ends(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[command].run(["--help"]) == 0
    assert capsys.readouterr().out == TEXTS[command]
    assert f"usage: {command_name(command)} [" in TEXTS[command]


def test_bounds_choices_and_defaults_are_shown_as_they_are_typed() -> None:
    lines = TEXT.splitlines()
    for line in (
        "  run.num_steps=100  (at least 1)",
        "  run.resume=false",
        "  learner.device=cpu  (cpu or cuda)",
        "  warm_start.optimizer={lr:0.003,warmup_steps:20,min_lr_ratio:0.1}",
        "  learner.optimizer.min_lr_ratio=1.0  (at least 0 and at most 1)",
        "  server.http_port=null  (at least 1 and at most 65535)",
    ):
        assert line in lines


def test_every_section_is_introduced_once_and_stays_together() -> None:
    shown = [leaf.name for leaf in leaves(TrainConfig()) if COMMANDS["train"].acts_on(leaf.name)]
    sections = [name.rpartition(".")[0] for name in shown]
    for section in set(sections) - {""}:
        assert TEXT.count(f"\n\n{section}: ") == 1, section
    assert TEXT.index("learner.mismatch_alarm=") < TEXT.index("learner.optimizer.lr=")


def test_lines_fit_a_terminal() -> None:
    assert max(len(line) for text in TEXTS.values() for line in text.splitlines()) <= WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_heavy_library(command: str) -> None:
    started = time.perf_counter()
    program = (
        f"import sys; from launch import {command}; {command}.main(['--help'])\n"
        "heavy = {'ray', 'torch', 'verl', 'numpy', 'hydra'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} take seconds' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
    assert time.perf_counter() - started < 60, "a second on a quiet machine"
