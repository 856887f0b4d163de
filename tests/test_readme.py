"""What README.md shows runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config import TrainConfig, compose
from launch.trainer import check_agent
from launch.workload import load_workload

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_own_agent_and_environment_take_thirty_lines_and_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = PROGRAMS[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 32
    (tmp_path / "my_workload.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_agent(load_workload("my_workload", seed=0))


def test_every_setting_and_recipe_that_the_readme_names_exists() -> None:
    text = README.replace(PROGRAMS[0], "")
    overrides = set(re.findall(r"\b((?:recipe|[a-z_]+\.[a-z_.]+)=[^\s`*…]+)", text))
    assert len(overrides) > 5
    assert isinstance(compose(sorted(overrides)), TrainConfig)


@pytest.mark.parametrize("program", PROGRAMS[1:], ids=["collect", "train"])
def test_the_reference_programs_import_what_exists(program: str) -> None:
    imports = "\n".join(line for line in program.splitlines() if line.startswith(("import ", "from ")))
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)
