"""Seconds until a fresh run learns and plays, and seconds per update by stage.

    python tests/benchmarks/startup.py [overrides of launch.train]

Runs the calculator recipe for five updates, as a user would, and reads its terminal and its metrics.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import repository
from report import Report

from launch.reporting.tracker import read_metrics

COMMAND = ("-m", "launch.train", "recipe=calculator", "run.num_steps=5", "evaluation.num_tasks=16")
MOMENTS = {
    "learner is up": "Learner:",
    "a tenth of the warm start (35 steps)": "warm start   35/",
    "policy server and rollout actors are up": "Policy server:",
    "first rollouts are in (evaluation)": "held-out success after step 0",
    "first update": "step    1/",
}
"""What is reached, and what the line says that tells it."""


def main() -> None:
    report = Report("startup: seconds from the command", ("moment", "seconds"))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-u", *COMMAND, f"run.directory={folder}", *sys.argv[1:]],
            cwd=repository.ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        waiting = dict(MOMENTS)
        assert process.stdout is not None
        for line in process.stdout:
            seconds = time.perf_counter() - start
            for moment in [moment for moment, mark in waiting.items() if mark in line]:
                report.add(moment, f"{seconds:.1f}")
                del waiting[moment]
        if process.wait():
            sys.exit(f"The run failed with status {process.returncode}: its error stands above.")
        report.add("the command ends", f"{time.perf_counter() - start:.1f}")
        steps = [record for record in read_metrics(Path(folder)) if "time/step" in record]
    report.print()
    stages = Report("an update: mean seconds, and shares of its time", ("metric", "mean"))
    for stage in sorted(name for name in steps[0] if name.startswith("time/")):
        stages.add(stage, f"{sum(step[stage] for step in steps) / len(steps):.2f}")
    stages.add("share of time/wait in which the engine idles", f"{idle_while_waiting(steps):.2f}")
    stages.print()


def idle_while_waiting(steps: Sequence[Mapping[str, float]]) -> float:
    """Share of the time for which the learner waits for rollouts, in which the engine computes nothing."""
    busy = sum((1 - step["time/engine_idle"]) * step["time/step"] for step in steps)
    return 1 - busy / sum(step["time/wait"] for step in steps)


if __name__ == "__main__":
    main()
