"""``tests/gpu/run.py`` on a machine without a GPU: each part is skipped with a sentence, and could start."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.settings.compose import compose
from launch.validation.serving import check_colocation
from launch.validation.settings import check_training_settings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_take_ten_minutes_and_name_programs_that_exist(script: Any) -> None:
    assert sum(part.seconds for part in script.PARTS.values()) <= 600
    programs = {part.arguments[0] for part in script.PARTS.values()} - {"-m"}
    assert programs and all((ROOT / program).is_file() for program in programs)


def test_training_passes_all_checks_before_start(script: Any) -> None:
    config = compose(script.SMOLLM2)
    check_training_settings(config)
    check_colocation(config)
    assert (config.learner.device, config.learner.dtype, config.server.colocated) == (
        "cuda",
        "bfloat16",
        True,
    )


def test_part_that_cannot_run_has_a_sentence(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    trees, training = script.PARTS["trees"], script.PARTS["training"]
    assert script.obstacle(trees, "cuda") == "it takes 1 GPU(s), and torch finds 0."
    assert script.obstacle(replace(trees, needs=["nope"]), "cuda") == "the package nope is not installed."
    assert script.obstacle(trees, "cpu") is None
    assert script.obstacle(training, "cpu") == "a CPU cannot run it, or takes too long."
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert script.obstacle(training, "cuda") is None
    assert script.obstacle(script.PARTS["nccl"], "cuda") == "it takes 2 GPU(s), and torch finds 1."


@pytest.mark.parametrize(("program", "verdict"), [("pass", "ok"), ("1/0", "FAILED with status 1")])
def test_verdict_is_that_of_the_program(script: Any, tmp_path: Path, program: str, verdict: str) -> None:
    part = script.Part("", (), ["-c", f"print('seen')\n{program}"], None, 60)
    found, lines = script.played("one", part, "cuda", tmp_path)
    assert found.startswith(verdict) and lines[0] == "seen"


@pytest.mark.slow
def test_program_that_hangs_is_ended(script: Any, tmp_path: Path) -> None:
    # Where these tests run in the background it would ignore the first signal, and be given 20 s more.
    sleeping = "import signal, time; signal.signal(2, signal.default_int_handler); time.sleep(600)"
    part = script.Part("", (), ["-c", sleeping], None, 1)
    assert script.played("one", part, "cuda", tmp_path)[0].startswith("FAILED: it was not done after 1 s")


@pytest.mark.parametrize(("last", "verdict"), [(0.97, "ok: 0.200 -> 0.970"), (0.5, "FAILED: 0.200")])
def test_training_has_to_reach_its_curve(script: Any, tmp_path: Path, last: float, verdict: str) -> None:
    records = [{"step": 0, "eval/reward_mean": 0.2}, {"step": 1}, {"step": 10, "eval/reward_mean": last}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    assert script.against_curve(tmp_path).startswith(verdict)
