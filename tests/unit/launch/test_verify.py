"""``launch.verify`` says of a run's folder whether the run has kept its promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.console import main

SETTINGS: dict[str, Any] = {
    "stages": ["reinforce"],
    "rollout": {"group_size": 2, "max_staleness": 1, "group_order": "tasks"},
    "run": {"num_steps": 2},
    "learner": {"mismatch_alarm": 1e-3},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two updates, with a held-out reward of 0.5 after the second."""
    (tmp_path / "settings.yaml").write_text(json.dumps(SETTINGS), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "eval/reward_mean": 0.5}\n', encoding="utf-8")
    updates = [
        {"step": 1, "trained": ["00000000/0000", "00000000/0001"], "dropped": {}},
        {"step": 2, "trained": ["00000001/0000", "00000001/0001"], "dropped": {}},
    ]
    journal = "".join(f"{json.dumps(update)}\n" for update in updates)
    (tmp_path / "consumed.jsonl").write_text(journal, encoding="utf-8")
    return tmp_path


def test_verify_finds_a_sound_run_sound(run: Path, capsys: Any) -> None:
    assert main(["verify", str(run), "--ended", "--score", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "4 rollouts were used in 2 updates, each once" in printed
    assert "the run has ended after 2 of 2 updates" in printed
    assert printed.count("sound  ") == printed.count("\n") == 8


def test_verify_names_a_rollout_that_is_missing(run: Path, capsys: Any) -> None:
    journal = run / "consumed.jsonl"
    journal.write_text(journal.read_text("utf-8").replace(', "00000000/0001"', ""), "utf-8")
    assert main(["verify", str(run)]) == 1
    assert "BROKEN  missing: 00000000/0001" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--score", "0.6"], "held-out reward is 0.500, 0.6 was asked for"),
        (["--ended"], "the run has ended after 1 of 2 updates"),
    ],
)
def test_verify_finds_a_broken_demand(run: Path, options: list[str], text: str, capsys: Any) -> None:
    if options == ["--ended"]:
        journal = run / "consumed.jsonl"
        journal.write_text(journal.read_text("utf-8").splitlines(keepends=True)[0], "utf-8")
    assert main(["verify", str(run), *options]) == 1
    assert f"BROKEN  {text}" in capsys.readouterr().out


def test_verify_refuses_a_folder_without_a_run(tmp_path: Path, capsys: Any) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "has no settings.yaml: name the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("settings", ["a: 1", "- 1", "rollout: 3", ""])
def test_verify_refuses_settings_of_something_else(run: Path, settings: str, capsys: Any) -> None:
    (run / "settings.yaml").write_text(settings, "utf-8")
    assert main(["verify", str(run)]) == 2
    assert "are not those of a training" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "record"),
    [
        ("metrics.jsonl", '{"step": 2, "stream/staleness_max": "x"}'),
        ("metrics.jsonl", '{"eval/reward_mean": "high", "step": 2}'),
        ("consumed.jsonl", '{"step": 1, "trained": ["a"], "dropped": {}}'),
        ("settings.yaml", json.dumps(SETTINGS | {"run": {}})),
    ],
)
def test_verify_refuses_records_of_something_else(run: Path, file: str, record: str, capsys: Any) -> None:
    (run / file).write_text(f"{record}\n", "utf-8")
    assert main(["verify", str(run), "--ended", "--score", "0.5"]) == 2
    assert "copy its settings.yaml, metrics.jsonl and consumed.jsonl again" in capsys.readouterr().err
