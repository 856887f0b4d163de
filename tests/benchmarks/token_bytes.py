"""Bytes of a trajectory for each token that differs, by its turns, and the driver's CPU for an update's data.

    python tests/benchmarks/token_bytes.py [--turns 1 10 20 50 100] [--rollouts 64]

A token counts once, however many turns repeat it at the same place behind the same others. With stripped
thoughts the next prompt holds an answer without its first half, which is the thought.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repository
from report import Report

from environments.types import TrajectoryGroup
from launch.run_folder.trajectory_log import TrajectoryLog
from policies.learning.samples import TrainBatch, training_samples

sys.path.insert(0, str(repository.ROOT / "tests"))
from played_trajectories import KINDS, measure, play


def update_seconds(num_rollouts: int, num_turns: int, size: int) -> dict[str, float]:
    """CPU seconds of the driver for the data of one update: by what it does."""
    trajectory = play(KINDS[0], num_turns, size, size)
    arriving = pickle.dumps(trajectory)
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        seconds[name] = time.process_time() - start
        return result

    trajectories = timed("arrive", lambda: [pickle.loads(arriving) for _ in range(num_rollouts)])
    samples = timed("samples", lambda: [each for every in trajectories for each in training_samples(every)])
    timed("to the ranks", lambda: pickle.dumps(TrainBatch(samples=tuple(samples))))
    group = TrajectoryGroup(group_id="0", task={}, trajectories=tuple(trajectories))
    with tempfile.TemporaryDirectory() as folder:
        timed("log", lambda: TrajectoryLog(Path(folder), 1).record_update(1, [group], {}, {}))
    return seconds | {"sum": sum(seconds.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 10, 20, 50, 100])
    parser.add_argument("--rollouts", type=int, default=64)
    options = parser.parse_args()
    columns = ["history, turns", "in memory", "pickled", "on disk", "to the ranks"]
    report = Report("Bytes for each token that differs", columns)
    for kind in KINDS:
        for num_turns in options.turns:
            found = measure(play(kind, num_turns))
            figures = (found.in_memory, found.pickled, found.on_disk, found.to_ranks)
            report.add(f"{kind}, {num_turns}", *(f"{each:.1f}" for each in figures))
    report.print()
    title = f"CPU seconds of the driver, {options.rollouts} rollouts x 50 turns x (200 + 200) tokens"
    report = Report(title, ["part", "seconds"])
    for name, seconds in update_seconds(options.rollouts, 50, 200).items():
        report.add(name, f"{seconds:.2f}")
    report.print()


if __name__ == "__main__":
    main()
