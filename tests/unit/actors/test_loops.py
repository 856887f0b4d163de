"""The table of concurrent loops at the head of ``actors`` has those that say so in their docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import actors

ROOT = Path(__file__).resolve().parents[3]
LAYERS = ("environments", "policies", "actors", "launch")
FORM = re.compile(r"\bconsumes .* · waits for .* · produces ")
WITHOUT_FORM = {("training loop", "launch/training/loop.py")}
"""Its docstring describes more than what it waits for."""


def loops_in_docstrings() -> Iterator[tuple[str, str]]:
    """Name of the class or method, and its file."""
    for path in (file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")):
        waiting = [("", ast.parse(path.read_text(encoding="utf-8")))]
        for name, node in waiting:
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    full = f"{name}.{each.name}".removeprefix(".")
                    waiting.append((full, each))
                    if FORM.search(ast.get_docstring(each) or ""):
                        yield full, str(path.relative_to(ROOT))


def loops_in_table() -> Iterator[tuple[str, str]]:
    """Names and files of the first column: a file ends the cell that begins with a name."""
    assert actors.__doc__ is not None
    (rule, width) = re.search(r"^((=+)  =+  =+  =+)$", actors.__doc__, re.MULTILINE).groups()  # type: ignore[union-attr]
    name = ""
    for line in actors.__doc__.split(rule)[2].splitlines():
        cell = line[: len(width)].strip()
        if cell.startswith("("):
            file = cell.strip("()")
            yield name, file if (ROOT / file).exists() else f"actors/{file}"
            name = ""
        else:
            name = name or cell.partition(",")[0]


def test_table_has_every_loop_once() -> None:
    table = list(loops_in_table())
    assert sorted(table) == sorted({*loops_in_docstrings(), *WITHOUT_FORM})
