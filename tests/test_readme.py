"""What README.md shows runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config import TrainConfig, compose
from launch.validation.trial import check_agent
from launch.workload import load_workload

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
OWN, CHECK, COLLECT, TRAIN = PROGRAMS


def test_the_own_agent_and_environment_take_thirty_lines_and_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in OWN.splitlines() if line.strip()]) < 30
    (tmp_path / "my_workload.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_agent(load_workload("my_workload", seed=0))


def test_the_check_of_the_own_environment_says_what_its_comment_says(tmp_path: Path) -> None:
    (tmp_path / "my_workload.py").write_text(OWN)
    (tmp_path / "program.py").write_text(CHECK)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == CHECK.rpartition("# ")[2].strip() == "CountEnv: all fine."


def test_every_setting_and_recipe_that_the_readme_names_exists() -> None:
    text = README.replace(OWN, "")
    overrides = set(re.findall(r"\b((?:recipe|[a-z_]+\.[a-z_.]+)=[^\s`*…]+)", text))
    assert len(overrides) > 5
    assert isinstance(compose(sorted(overrides)), TrainConfig)


@pytest.mark.slow
@pytest.mark.parametrize("program", [COLLECT, TRAIN], ids=["collect", "train"])
def test_the_reference_programs_import_what_exists(program: str) -> None:
    imports = "\n".join(line for line in program.splitlines() if line.startswith(("import ", "from ")))
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)
