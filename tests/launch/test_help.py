"""What ``--help`` prints."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from environments.bounds import leaves
from launch.config import TrainConfig
from launch.help import WIDTH, help_text

TEXT = help_text("launch.train", "Train.")


def test_every_setting_is_shown_with_a_sentence() -> None:
    settings = list(leaves(TrainConfig()))
    assert len(settings) > 80
    for leaf in settings:
        shown = re.search(rf"^  {re.escape(leaf.name)}=.*\n((?:      .+\n)+)", TEXT, re.MULTILINE)
        assert shown and shown[1].rstrip().endswith((".", "...")), leaf.name


def test_bounds_choices_and_defaults_are_shown_as_they_are_typed() -> None:
    lines = TEXT.splitlines()
    for line in (
        "  run.num_steps=100  (at least 1)",
        "  run.resume=false",
        "  learner.device=cpu  (cpu or cuda)",
        "  learner.optimizer.betas=[0.9,0.95]  (at least 0 and below 1)",
        "  server.http_port=null  (at least 1 and at most 65535)",
    ):
        assert line in lines


def test_every_section_is_introduced_once_and_stays_together() -> None:
    sections = [leaf.name.rpartition(".")[0] for leaf in leaves(TrainConfig())]
    for section in set(sections) - {""}:
        assert TEXT.count(f"\n\n{section}: ") == 1, section
    assert TEXT.index("learner.mismatch_alarm=") < TEXT.index("learner.optimizer.lr=")


def test_lines_fit_a_terminal() -> None:
    assert max(map(len, TEXT.splitlines())) <= WIDTH


@pytest.mark.parametrize("command", ["train", "evaluate", "serve"])
def test_help_needs_no_heavy_library(command: str) -> None:
    started = time.perf_counter()
    program = (
        f"import sys; from launch import {command}; {command}.main(['--help'])\n"
        "heavy = {'ray', 'torch', 'verl', 'numpy', 'hydra'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} take seconds' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    assert time.perf_counter() - started < 10, "a second on a quiet machine"
