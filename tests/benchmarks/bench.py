"""The short form of the benchmarks of the system: one file of figures and one picture.

    make bench                                    all parts, in under twenty minutes
    make bench ARGS="--parts learner,start"       some of them
    make bench ARGS="--publish"                   READMEs show these figures from now on

It runs other programs of this folder one after the other, with the options in ``PARTS``, and writes into
``runs/bench``: ``bench.json`` has their tables, with the load average of the machine before and after each;
``bench.png`` shows them. A part that fails is named there too, and makes the command fail when all have run.
Figures are of the machine as it is: let nothing else run on it.

``--publish`` writes both files into .github/, all tables into this folder's README, and a few figures into
.docs/pages/tested.md. It needs all parts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import repository
from readme_tables import PUBLISHED, markdown, write_measured
from report import TABLES

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Highlight:
    """A figure that the first page shows: where it stands in a part's tables, and what it says."""

    text: str
    row: Sequence[str]
    """The row's first cells."""
    column: str


@dataclass(frozen=True)
class Part:
    """A program with its options, and what of its tables is drawn and shown on the first page."""

    program: str
    options: Sequence[str]
    drawn: Mapping[str, Sequence[str]]
    """A column of figures, and those that name its rows. A table without the column is in the file only."""
    highlights: Sequence[Highlight]


PARTS = {
    "start": Part(
        "startup.py",
        [],
        {"seconds": ["moment"]},
        [
            Highlight(
                "seconds from the command to the first five optimizer steps",
                ["first steps of the warm start (5)"],
                "seconds",
            ),
            Highlight(
                "seconds from the command until the policy answers a client",
                ["the policy server answers a client"],
                "seconds",
            ),
        ],
    ),
    "learner": Part(
        "learner_speed.py",
        ["--rounds", "3"],
        {"of plain": ["model, load"]},
        [
            Highlight(
                "tokens a second of the learner, divided by a plain loop's: tiny model (0.35 M)",
                ["tiny, even"],
                "of plain",
            ),
            Highlight("the same with SmolLM2-135M", ["smollm2, even"], "of plain"),
            Highlight(
                "the same with SmolLM2-135M, where eight samples share a prompt",
                ["smollm2, 10 x prompt, shared by 8"],
                "of plain",
            ),
        ],
    ),
    "episodes": Part(
        "throughput.py",
        ["--rounds", "3"],
        {"requests/s": ["arm"], "ms": ["process"]},
        [
            Highlight(
                "requests a second of 64 agents, divided by the bare engine's: tiny model",
                ["AgentExecutionEngine"],
                "of bare",
            )
        ],
    ),
    "asynchronous": Part(
        "async_training.py",
        ["--seeds", "0", "--updates", "8"],
        {"seconds": ["staleness"]},
        [
            Highlight("seconds of eight updates where environments are slow, in turns", ["0"], "seconds"),
            Highlight("the same with `rollout.max_staleness=2`", ["2"], "seconds"),
        ],
    ),
    "publish": Part(
        "publish.py",
        ["--models", "tiny"],
        {"together": ["model", "replicas"]},
        [Highlight("seconds until two replicas serve new weights", ["tiny", "2"], "together")],
    ),
    "recovery": Part(
        "chaos.py",
        ["--recover", "--kinds", "learner,fleet", "--staleness", "0"],
        {"seconds": ["struck"]},
        [Highlight("seconds from a killed learner to the second update after it", ["learner"], "seconds")],
    ),
    "peers": Part(
        "peers.py",
        ["--rounds", "1", "--updates", "6"],
        {"seconds": ["arm"]},
        [
            Highlight(
                "seconds of a GRPO step in turns, divided by TRL's: tiny model",
                ["troupe, max_staleness=0"],
                "of trl",
            )
        ],
    ),
    "growth": Part(
        "growth.py",
        ["--up-to", "256", "--only", "samples,tokens", "--updates", "6"],
        {"ms a token": ["what grows", "size"]},
        [],
    ),
}


def measure(name: str, part: Part) -> dict[str, Any]:
    """Run a part; return its tables, its seconds, and its exit status."""
    print(f"\n== {name}: {part.program} {' '.join(part.options)}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder) / "tables.jsonl"
        tables.touch()
        status = subprocess.run(
            [sys.executable, str(HERE / part.program), *part.options],
            cwd=repository.ROOT,
            env=os.environ | {TABLES: str(tables)},
        ).returncode
        found = [json.loads(line) for line in tables.read_text(encoding="utf-8").splitlines()]
    return {
        "part": name,
        "program": " ".join([part.program, *part.options]),
        "exit_status": status,
        "seconds": round(time.monotonic() - start, 1),
        "tables": found,
    }


def machine() -> dict[str, Any]:
    """What the figures are of."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=repository.ROOT, capture_output=True, text=True
    )
    return {
        "processor": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def draw(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel of bars for each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [
        (table, column, label)
        for each in measured
        for table in each["tables"]
        for column, label in PARTS[each["part"]].drawn.items()
        if column in table["columns"]
    ]
    heights = [len(table["rows"]) + 2 for table, _, _ in panels]
    figure, axes = plt.subplots(
        len(panels), figsize=(9, 0.3 * sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (table, column, label), panel in zip(panels, axes[:, 0], strict=True):
        places = [table["columns"].index(each) for each in label]
        value = table["columns"].index(column)
        rows = [row for row in table["rows"] if row[value]]
        names = [", ".join(row[place] for place in places) for row in rows]
        bars = panel.barh(range(len(rows)), [float(row[value]) for row in rows], color="#4477aa")
        panel.bar_label(bars, [row[value] for row in rows], padding=3, fontsize=8)
        panel.set_yticks(range(len(rows)), names, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.1)
        panel.set_title(f"{column}: {table['title']}", fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def highlights(measured: Sequence[dict[str, Any]]) -> str:
    """The table of the page of what has been run, as Markdown.

    Raises:
        LookupError: a part has no table with a highlight's row and column.
    """
    rows = []
    for each in measured:
        for highlight in PARTS[each["part"]].highlights:
            table, row = _find(each["tables"], highlight)
            figure = row[table["columns"].index(highlight.column)]
            rows.append([highlight.text, figure, _load(table)])
    return markdown(["`make bench`", "measured", "load average before, after"], rows)


def _find(tables: Sequence[dict[str, Any]], highlight: Highlight) -> tuple[dict[str, Any], Sequence[str]]:
    """The table and the row in which a highlight stands."""
    for table in tables:
        for row in table["rows"]:
            if highlight.column in table["columns"] and row[: len(highlight.row)] == list(highlight.row):
                return table, row
    raise LookupError(f"No table has the row {list(highlight.row)} and the column {highlight.column!r}.")


def _load(table: Mapping[str, Any]) -> str:
    return f"{table['load_average']['before']:.1f}, {table['load_average']['after']:.1f}"


def all_tables(measured: Sequence[dict[str, Any]]) -> str:
    """Every table, as Markdown, below its title and the load."""
    parts = []
    for each in measured:
        for table in each["tables"]:
            head = f"**{each['part']}** (`{each['program']}`): {table['title']}; load average {_load(table)}."
            parts.append(f"{head}\n\n{markdown(table['columns'], table['rows'])}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=repository.ROOT / "runs" / "bench")
    parser.add_argument("--publish", action="store_true", help="have READMEs show these figures")
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    if unknown := sorted({*names} - {*PARTS}):
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if arguments.publish and (missing := [name for name in PARTS if name not in names]):
        parser.error(f"--publish needs all parts: {', '.join(missing)} would be missing")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    figures = {"machine": machine(), "parts": [measure(name, PARTS[name]) for name in names]}
    file, picture = arguments.folder / "bench.json", arguments.folder / "bench.png"
    file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    failed = [each["part"] for each in figures["parts"] if each["exit_status"]]
    if any(each["tables"] for each in figures["parts"]):
        draw(figures["parts"], picture)
    print(f"\nFigures: {file}\nPicture: {picture}")
    if failed:
        sys.exit(f"These parts failed, and their output stands above: {', '.join(failed)}.")
    if arguments.publish:
        for each in (file, picture):
            shutil.copy(each, PUBLISHED / each.name)
        write_measured(HERE / "README.md", "bench", all_tables(figures["parts"]))
        write_measured(repository.ROOT / ".docs/pages/tested.md", "bench", highlights(figures["parts"]))


if __name__ == "__main__":
    main()
