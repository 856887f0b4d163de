"""What ``tests/benchmarks/bench.py`` publishes, on tables made up here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    return importlib.import_module("bench")


def measured(rows: list[list[str]]) -> list[dict[str, Any]]:
    """The start as it is measured, with a table that nothing is taken from."""
    load = {"before": 0.25, "after": 2.0}
    stages = {"title": "stages", "columns": ["metric", "mean"], "rows": [], "load_average": load}
    start = {"title": "start", "columns": ["moment", "seconds"], "rows": rows, "load_average": load}
    return [{"part": "start", "program": "startup.py", "tables": [stages, start]}]


def test_first_page_gets_figures_with_the_load(bench: Any) -> None:
    rows = [["the policy server answers a client", "22.8"], ["first steps of the warm start (5)", "19.7"]]
    assert bench.highlights(measured(rows)).splitlines()[2:] == [
        "| seconds from the command to the first five optimizer steps | 19.7 | 0.2, 2.0 |",
        "| seconds from the command until the policy answers a client | 22.8 | 0.2, 2.0 |",
    ]


def test_figure_that_was_not_measured_is_named(bench: Any) -> None:
    with pytest.raises(LookupError, match=r"\['the policy server answers a client'\].*'seconds'"):
        bench.highlights(measured([["first steps of the warm start (5)", "19.7"]]))


def test_page_of_what_has_been_run_shows_all_highlights(bench: Any) -> None:
    page = (ROOT / ".docs/pages/tested.md").read_text(encoding="utf-8")
    table = page.partition("<!-- measured: bench -->\n")[2].partition("<!-- end -->")[0]
    shown = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert shown == [each.text for part in bench.PARTS.values() for each in part.highlights]
