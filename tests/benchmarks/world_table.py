"""What our adapters play of the worlds of others: every entry of each registry, or the reason why not.

    python tests/benchmarks/world_table.py [REGISTRY ...] [--folder FOLDER] [--write]

Each registry has an environment with its packages in ``FOLDER``, beside a file of its rows. What is finished
is kept: take away a row, or the file, to play again. ``worlds.json`` and ``worlds.md`` are the tables of all
rows; ``--write`` puts the short form into the page of the adapters.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import repository
from readme_tables import markdown, write_measured
from report import Report

PACKAGES = {
    "reasoning-gym": ["reasoning-gym==0.1.25"],
    "textarena": ["textarena==0.7.4", "numpy"],
    "gymnasium": ["gymnasium==1.4.0", "minigrid[wfc]==3.2.0", "ale-py==0.12.1", "box2d==2.3.10", "jax"],
    "verifiers": [
        *("verifiers[ta]==0.4.0", "carla-env==0.0.1", "mazebench==0.2.19", "sophistry-bench-sprint==0.1.6"),
        *("staros-stardata==0.1.1", "tasksets==0.1.4"),
    ],
}
"""The packages of each registry. Box2D and jax are for worlds of Gymnasium's own."""
PAGE = repository.ROOT / "environments" / "README.md"
LONGEST_REASON = 150
"""Characters of a reason in the short form."""
OUTCOMES = ("played", "rejected", "failed")


def main() -> None:
    """Play, print the sums, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("registries", nargs="*", metavar="REGISTRY", help=f"of {', '.join(PACKAGES)}: all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "troupe-worlds"))
    parser.add_argument("--python", default=sys.executable, help="the Python of new environments")
    parser.add_argument("--write", action="store_true", help=f"put the short form into {PAGE}")
    options = parser.parse_args()
    if unknown := set(options.registries) - set(PACKAGES):
        parser.error(f"There is no registry {', '.join(unknown)}: there are {', '.join(PACKAGES)}.")
    columns = ["registry", "worlds", *OUTCOMES, "right answers", "above 0", "of 1"]
    report = Report("worlds of others, played by our adapters", columns)
    for registry in options.registries or PACKAGES:
        python = environment(options.folder / registry, PACKAGES[registry], options.python)
        program = repository.ROOT / "tests" / "outside_worlds.py"
        subprocess.run([python, program, registry, options.folder / f"{registry}.jsonl"], check=True)
    tables = {
        name: [json.loads(line) for line in file.read_text().splitlines()]
        for name in PACKAGES
        if (file := options.folder / f"{name}.jsonl").exists()
    }
    for name, rows in tables.items():
        report.add(*sums(name, rows))
    report.print()
    (options.folder / "worlds.json").write_text(json.dumps(tables, indent=1))
    (options.folder / "worlds.md").write_text("\n\n".join(map(whole, tables, tables.values())))
    if options.write:
        short = [markdown(columns, [sums(name, rows) for name, rows in tables.items()])]
        why = [[name, *row] for name, rows in tables.items() for row in reasons(rows)]
        short.append(markdown(["registry", "worlds", "not played, or in part", "such as"], why))
        write_measured(PAGE, "worlds", "\n\n".join(short))


def environment(folder: Path, packages: list[str], python: str) -> Path:
    """The Python of an environment with ``packages``, which is made where it is not there."""
    done = folder / "installed"
    if not done.exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        done.touch()
    return folder / "bin" / "python"


def sums(registry: str, rows: list[dict[str, Any]]) -> list[str]:
    """The numbers of worlds by outcome, with a right answer, and where that earns something, and all."""
    numbers = [sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES]
    right = [row["right"] for row in rows if "right" in row]
    earned, full = (sum(reward > 0 for reward in right), sum(reward >= 1 for reward in right))
    return [registry, *map(str, (len(rows), *numbers, len(right), earned, full))]


def reasons(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each reason once, with the number of its worlds and one of them; the most frequent first."""
    worlds = defaultdict(list)
    for row in rows:
        if "reason" in row:
            worlds[f"{row['outcome']}: {general(row['reason'], row['world'])}"].append(row["world"])
    ordered = sorted(worlds.items(), key=lambda each: -len(each[1]))
    return [[str(len(names)), reason, f"`{names[0]}`"] for reason, names in ordered]


def general(reason: str, world: str) -> str:
    """A reason without what differs from world to world: names, paths, numbers."""
    plain = re.sub(r"\{.*?\}+ ?|\s+", " ", reason.replace(world, "it").replace("|", "\\|"))
    plain = re.sub(r"'?/\S+|\b\d+(\.\d+)?(, \d+)*", "…", plain)
    return plain if len(plain) <= LONGEST_REASON else f"{plain[:LONGEST_REASON]} …"


def whole(registry: str, rows: list[dict[str, Any]]) -> str:
    """The table of a registry, a row for each world."""
    columns = ["world", "outcome", "steps", "ended", "reward", "right", "reason"]
    cells = [
        [str(row.get(column, "")).replace("|", "\\|").replace("\n", " ") for column in columns]
        for row in rows
    ]
    return f"# {registry}\n\n{markdown(columns, cells)}\n"


if __name__ == "__main__":
    main()
