"""What a benchmark prints: one table, with the load average of the machine before and after."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

TABLES = "TROUPE_BENCHMARK_TABLES"
"""Environment variable: a file that printed tables are added to as lines of JSON. ``bench.py`` sets it."""


class Report:
    """Rows of one table. Make it before anything is started: it takes the load average then.

    Args:
        title: what was measured, and how.
        columns: their heads.
    """

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._title = title
        self._rows: list[Sequence[str]] = [columns]
        self._load_before = os.getloadavg()[0]

    def add(self, *cells: str) -> None:
        """Append a row."""
        self._rows.append(cells)

    def print(self) -> None:
        """Write the table to the terminal: the first column to the left, figures to the right."""
        load_after = os.getloadavg()[0]
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        print(f"\n{self._title}\n")
        for first, *rest in self._rows:
            figures = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            print("  ".join([first.ljust(widths[0]), *figures]))
        print(f"\nload average {self._load_before:.2f} before, {load_after:.2f} after", flush=True)
        if TABLES in os.environ:
            columns, *rows = self._rows
            table = {
                "title": self._title,
                "columns": columns,
                "rows": rows,
                "load_average": {"before": self._load_before, "after": load_after},
            }
            with open(os.environ[TABLES], "a", encoding="utf-8") as file:
                print(json.dumps(table), file=file)
