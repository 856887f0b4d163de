"""Measured values in READMEs: tables between two comments of a page, and the folder of plots and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import repository

PUBLISHED = repository.ROOT / ".github"
"""Plots that READMEs show, and the values behind them."""
END = "<!-- end -->"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines)


def write_measured(page: Path, name: str, text: str) -> None:
    """Replace what stands in ``page`` between the line ``<!-- measured: NAME -->`` and the next end line."""
    begin = f"<!-- measured: {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(f"{begin}\n")
    if not rest:
        raise SystemExit(f"{page} has no line {begin!r}: add it, and {END!r} below it.")
    _, _, after = rest.partition(f"{END}\n")
    page.write_text(f"{before}{begin}\n{text}\n{END}\n{after}", encoding="utf-8")
