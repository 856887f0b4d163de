"""Two updates on what programs of others do, by the benchmark that trains them to the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.outside

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    *("rollout.groups_per_step=3", "rollout.group_size=4", "learner.mini_batch_size=6"),
    *("evaluation.num_tasks=8", "fleet.num_actors=4", "algorithm.entropy_coef=0.01"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("program", ["agents", "anthropic", "langgraph", "pydantic_ai", "mini"])
def test_program_is_trained_on_its_own_tokens(program: str, folder: Path) -> None:
    command = [sys.executable, "tests/benchmarks/trained_programs.py", "--updates=2", "--warm-steps=60"]
    command += [f"--runs={program}/0", f"--folder={folder}", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((folder / program / "seed-0" / "finished.json").read_text())
    assert counts["calls"] >= 24 and counts["sampled tokens"] == counts["trained tokens"] > 0
    assert counts["retokenized"] == counts["foreign answers"] == 0
