"""What a benchmark prints: one table, with the load average of the machine before and after."""

from __future__ import annotations

import os
from collections.abc import Sequence


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
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        print(f"\n{self._title}\n")
        for first, *rest in self._rows:
            figures = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            print("  ".join([first.ljust(widths[0]), *figures]))
        print(f"\nload average {self._load_before:.2f} before, {os.getloadavg()[0]:.2f} after")
