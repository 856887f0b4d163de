"""``policies/learning/README.md`` says what the code says: its table has the parts of the rows."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from launch.settings.compose import compose
from policies.learning.algorithms import ALGORITHMS, SHIPPED, resolve
from policies.learning.registry import ESTIMATORS, LOSSES, Definition

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "policies" / "learning"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def settings_of(definition: Definition) -> str:
    estimator, loss = ESTIMATORS[definition.advantage], LOSSES[definition.loss]
    names = ["gamma"] * estimator.discounts + ["clip_low", "clip_high"] * loss.clips
    names += [
        f"options.{each.name}"
        for row in (estimator, loss)
        for each in fields(row.options)
        if each.name not in definition.options
    ]
    names += ["learner.critic"] * estimator.uses_critic
    return ", ".join(f"`{name}`" for name in names)


def test_table_of_algorithms_has_the_parts_of_the_rows() -> None:
    lines = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| `")]
    rows = {
        line[0].strip("`"): line[1:6] for line in lines if len(line) > 5 and "algorithm.name" not in line[0]
    }
    assert rows.keys() == SHIPPED
    for name, (objective, parts, groups, settings, paper) in rows.items():
        definition = ALGORITHMS[name]
        assert objective and paper, name
        assert parts == f"`{definition.advantage}`, `{definition.loss}`", name
        assert groups.startswith(f"{definition.zero_signal_groups}: "), name
        assert settings == settings_of(definition), name


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", README))
    assert len(named) > 5
    missing = {name for name in named if not any((root / name).exists() for root in (FOLDER, ROOT))}
    assert not missing


def test_algorithm_of_the_example_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_algorithm.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (settings,) = re.findall(r"launch.train (.*)", README)
    algorithm = resolve(compose(settings.split()).algorithm, 64)
    assert (algorithm.advantage, algorithm.loss, algorithm.options) == (
        "centered",
        "reinforce",
        {"factor": 2},
    )


def test_pages_count_the_algorithms() -> None:
    number = {15: "fifteen"}[len(SHIPPED)]
    for page, counts in (("README.md", 1), (".docs/pages/tested.md", 2)):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.findall(r"(\w+teen|twelve) algorithms", text) == [number] * counts, page
