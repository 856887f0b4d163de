"""torchao's optimizer of eight bits, for real: it learns, and a checkpoint goes on from its moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside_packages import environment_with

TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.outside
def test_moments_of_eight_bits_are_saved_and_loaded(tiny_model: Path, tmp_path: Path) -> None:
    library = environment_with(TESTS / "outside_torchao.txt").parent / "lib"
    packages = next(library.glob("python*/site-packages"))
    paths = map(str, (TESTS.parent, TESTS, packages))  # torch and verl are those of this environment
    done = subprocess.run(
        [sys.executable, TESTS / "outside_torchao.py", tiny_model, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    small, plain = result["bytes"]
    assert small < 0.3 * plain and result["loaded"] == small
    assert 0 < result["differs_from_float32"] < 0.04, "four steps of 0.001 at most, of either sign"
    assert result["differs_when_loaded"] == 0
    assert result["differs_after_another"] < 1e-4, "moments are rounded anew: a tenth of a step"
    assert result["lr"][0] == result["lr"][1]
