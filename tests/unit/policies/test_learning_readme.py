"""``policies/learning/README.md`` says what the code says: its table is that of the rows."""

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
HEAD = (
    "| `algorithm.name` | objective | estimator, loss | groups rewarded alike | settings of its own | paper "
    "| by default not as in the paper |\n|---|---|---|---|---|---|---|\n"
)


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


def table() -> str:
    rows = [
        f"| `{name}` | {definition.summary} | `{definition.advantage}`, `{definition.loss}` | "
        f"{definition.zero_signal_groups}: {definition.zero_signal_source} | {settings_of(definition)} | "
        f"{definition.paper} | {definition.differences} |"
        for name, definition in ALGORITHMS.items()
        if name in SHIPPED
    ]
    return HEAD + "\n".join(rows) + "\n"


def test_table_of_algorithms_is_that_of_the_rows() -> None:
    assert table() in README, f"put this table into policies/learning/README.md:\n\n{table()}"


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
