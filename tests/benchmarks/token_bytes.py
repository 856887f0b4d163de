"""Bytes of a trajectory for each token that differs, by its turns, and the driver's CPU for an update's data.

    python tests/benchmarks/token_bytes.py [--turns 1 10 20 50 100] [--updates 64x50x400 512x100x200]

A token counts once, however many turns repeat it at the same place behind the same others. With stripped
thoughts the next prompt holds an answer without its first half, which is the thought.

An update is what the driver does with its rollouts, of so many turns of so many tokens, in a run with the
default settings: it takes them, makes samples, sends them to a rank and gets their scores, gives credit,
sends the columns to learn from, and writes log and metrics. Ray's own work at each call is not in it. The
peak is that of the whole process, with all that was measured before.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import repository
from ray import cloudpickle
from report import Report

from environments.columns import stored
from environments.types import TrajectoryGroup
from launch.reporting.metrics import rollout_metrics, staleness, token_metrics
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.mini_batches import make_batches
from launch.training.selection import Selection, place
from launch.training.stages.policy_update import turn_advantages
from launch.training.stages.reinforce import with_credit
from launch.training.trainer import rarely_collected
from policies.learning.algorithm import Algorithm
from policies.learning.division import OLD_LOGPROBS, Columns, Division, policy_columns
from policies.learning.kl import KLController
from policies.learning.samples import TrainBatch

sys.path.insert(0, str(repository.ROOT / "tests"))
from played_trajectories import KINDS, measure, play

GROUP_SIZE = 8
LONGEST, PAIRS_PER_TOKEN = 1 << 16, 3 * 576
"""Tokens of a micro-batch, and the pairs of tokens of a model of SmolLM2-135M's width."""
LOG = "log"

T = TypeVar("T")


class Update:
    """What the driver does with an update's rollouts, and its CPU seconds by part."""

    def __init__(self, num_rollouts: int, num_turns: int, num_tokens: int) -> None:
        trajectory = play(KINDS[0], num_turns, num_tokens // 2, num_tokens - num_tokens // 2)
        self._arriving, self._num_rollouts = [], num_rollouts
        for reward in (0.0, 1.0):
            trajectory.steps[-1].reward = trajectory.reward = reward
            self._arriving.append(cloudpickle.dumps(trajectory))
        self.seconds: dict[str, float] = {}

    def make(self) -> None:
        """Do all of it once."""
        config = TrainConfig()
        algorithm = algorithm_of(config)
        selection = Selection()
        self._timed("take", lambda: self._place_arrived(selection, config, algorithm))
        rollouts = [each for group in selection.useful for each in group.trajectories]
        batches = self._timed("samples", lambda: make_batches(config, rollouts, ""))
        division = self._timed("to the ranks", lambda: Division(batches, 1, LONGEST, PAIRS_PER_TOKEN))
        self._timed("to the ranks", lambda: cloudpickle.dumps(division.ids(0)))
        self._timed("to the ranks", lambda: cloudpickle.dumps(division.shards(batches, ())))
        scores = cloudpickle.dumps(self._scores(batches))
        scored = self._timed("from the ranks", lambda: division.with_columns(batches, [pickle.loads(scores)]))
        kl = KLController(algorithm)
        batches, _ = self._timed("credit", lambda: with_credit(algorithm, kl, selection.groups, scored))
        columns = [*policy_columns(algorithm), *OLD_LOGPROBS]
        self._timed("to the ranks", lambda: cloudpickle.dumps(division.shards(batches, columns)))
        advantages = self._timed(LOG, lambda: turn_advantages(batches))
        with tempfile.TemporaryDirectory() as folder:
            log = TrajectoryLog(Path(folder), 1)
            self._timed(LOG, lambda: log.record_update(1, selection.useful, selection.unused, advantages))
        self._timed("metrics", lambda: rollout_metrics(selection.taken))
        self._timed("metrics", lambda: token_metrics(selection.useful, selection.unused))
        self._timed("metrics", lambda: staleness(selection.groups, 0))

    def _place_arrived(self, selection: Selection, config: TrainConfig, algorithm: Algorithm) -> None:
        for group in range(self._num_rollouts // GROUP_SIZE):
            members = tuple(pickle.loads(self._arriving[number % 2]) for number in range(GROUP_SIZE))
            for number, each in enumerate(members):
                each.rollout_id = f"{group:08d}/{number:04d}"
                # No two rollouts begin alike: else the ranks would get the ids of one.
                low_and_high = each.columns._arrays[0]
                low_and_high[0], low_and_high[len(low_and_high) // 2] = number, group
            taken = TrajectoryGroup(group_id=f"{group:08d}", task=members[0].task, trajectories=members)
            place(selection, taken, 0, config, algorithm)

    def _scores(self, batches: list[TrainBatch]) -> list[Columns]:
        """As a rank returns them: the first mini-batch finds its scores in its own step."""
        rows = ([stored(each, "rollout_logprobs") for each in batch.samples] for batch in batches[1:])
        return [{}, *({"old_logprobs": each} for each in rows)]

    def _timed(self, name: str, run: Callable[[], T]) -> T:
        start = time.process_time()
        result = run()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start
        return result


def report_updates(sizes: list[str]) -> None:
    """Print a column for each size."""
    Update(GROUP_SIZE, 2, 20).make()  # the first one loads modules
    columns = {}
    for size in sizes:
        update = Update(*map(int, size.split("x")))
        with rarely_collected():  # as in a run
            update.make()
        taken, whole = update.seconds, sum(update.seconds.values())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        columns[size] = [f"{each:.2f}" for each in (*taken.values(), whole, taken[LOG] / whole, peak)]
    names = [*taken, "sum", "log, of the sum", "peak GiB"]
    report = Report("CPU seconds of the driver, rollouts x turns x tokens", ["part", *columns])
    for name, *cells in zip(names, *columns.values(), strict=True):
        report.add(name, *cells)
    report.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 10, 20, 50, 100])
    parser.add_argument("--updates", nargs="+", default=["64x50x400", "512x100x200"])
    options = parser.parse_args()
    columns = ["history, turns", "in memory", "pickled", "on disk", "to the ranks"]
    report = Report("Bytes for each token that differs", columns)
    for kind in KINDS:
        for num_turns in options.turns:
            found = measure(play(kind, num_turns))
            figures = (found.in_memory, found.pickled, found.on_disk, found.to_ranks)
            report.add(f"{kind}, {num_turns}", *(f"{each:.1f}" for each in figures))
    report.print()
    report_updates(options.updates)


if __name__ == "__main__":
    main()
