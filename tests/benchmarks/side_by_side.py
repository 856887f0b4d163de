"""Two runs side by side on one cluster, and each of them alone: which of their numbers differ.

    python tests/benchmarks/side_by_side.py [--updates 10] [overrides of launch.train]

The runs join a Ray cluster that is there. They differ in their seed. Compared are all metrics but times, and
the weights of the last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from programs import Program
from report import Report
from repository import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from head_node import head_node

from launch.reporting.tracker import read_metrics

SEEDS = (1, 2)
LIMIT_SECONDS = 1500.0
OF_TIME = ("seconds", "time/", "requests_waiting", "stream/actors")
"""Parts of the names of metrics that depend on the machine's speed."""


def numbers_of(run: Path) -> dict[tuple[float, str], float]:
    """Metrics of a run by update and name, but those of time."""
    return {
        (row["step"], name): value
        for row in read_metrics(run)
        for name, value in row.items()
        if not any(part in name for part in OF_TIME)
    }


def weights_of(run: Path) -> str:
    """A digest of the weights and moments in the last checkpoint."""
    files = sorted((run / "checkpoints" / "latest").glob("state_*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def train(
    runs: Sequence[Path], seeds: Sequence[int], overrides: Sequence[str], environment: dict[str, str]
) -> float:
    """Train a run for each seed, all at once; return the seconds."""
    start, programs = time.monotonic(), list[Program]()
    try:
        for run, seed in zip(runs, seeds, strict=True):
            programs.append(Program([*overrides, f"seed={seed}", f"run.directory={run}"], environment))
        for program in programs:
            if program.wait(LIMIT_SECONDS) != 0:
                sys.exit("\n".join([*program.lines, "The run failed."]))
    finally:
        for program in programs:
            program.end()
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=10)
    arguments, overrides = parser.parse_known_args()
    overrides = [
        "recipe=calculator",
        f"run.num_steps={arguments.updates}",
        "warm_start.num_steps=20",
        "evaluation.num_tasks=16",
        *overrides,
    ]
    columns = ("seed", "metrics", "that differ", "same weights", "seconds alone", "side by side")
    report = Report(f"{arguments.updates} updates of two runs on one cluster", columns)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        head_node(16, RAY_AUTH_MODE="disabled") as environment,
    ):
        alone = [Path(folder, f"alone_{seed}") for seed in SEEDS]
        beside = [Path(folder, f"beside_{seed}") for seed in SEEDS]
        seconds = [
            train([run], [seed], overrides, environment) for run, seed in zip(alone, SEEDS, strict=True)
        ]
        both = train(beside, SEEDS, overrides, environment)
        is_same = True
        for seed, one, two, lasted in zip(SEEDS, alone, beside, seconds, strict=True):
            first, second = numbers_of(one), numbers_of(two)
            differ = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
            for step, name in differ[:10]:
                before, after = first.get((step, name)), second.get((step, name))
                print(f"seed {seed}, update {step:g}: {name} {before} {after}")
            same = weights_of(one) == weights_of(two)
            is_same &= same and not differ
            report.add(
                str(seed), str(len(first)), str(len(differ)), str(same), f"{lasted:.0f}", f"{both:.0f}"
            )
    report.print()
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
