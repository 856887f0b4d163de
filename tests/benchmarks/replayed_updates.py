"""Ten updates of a finished run, computed again: how many come out bit for bit, and in how many seconds.

    python tests/benchmarks/replayed_updates.py [overrides of launch.train]

Trains the calculator recipe for 20 updates with a checkpoint after ten, and computes the last ten again. The
eleventh is computed with another algorithm and a group less, and with its own reward function, which changes
nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import repository
from report import Report

TRAIN = (
    "recipe=calculator",
    "run.num_steps=20",
    "run.checkpoints.every=10",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "learner.mini_batch_size=8",
    "evaluation.num_tasks=8",
)


def seconds_of(*command: str) -> tuple[float, str]:
    """Seconds that a command takes, and all that it prints."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=repository.ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout + done.stderr, flush=True)
    return time.monotonic() - start, done.stdout


def main(overrides: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as run:
        report = Report("20 updates, and some of them again", ("command", "lines that say same", "seconds"))
        trained, _ = seconds_of("launch.train", *TRAIN, f"run.directory={run}", *overrides)
        report.add("launch.train", "-", f"{trained:.1f}")
        for update, *change in (
            ("20",),
            ("11", "algorithm.name=dr_grpo", "--without", "41"),
            ("11", "--reward", "environments:math_reward_fn"),
        ):
            seconds, printed = seconds_of("launch.replay", run, "--update", update, *change)
            name = " ".join(["launch.replay --update", update, *change])
            report.add(name, str(printed.count("same  ")), f"{seconds:.1f}")
        report.print()


if __name__ == "__main__":
    main(sys.argv[1:])
