"""Rollouts to the same success with and without a curriculum, where a third of the tasks teaches something.

    python tests/benchmarks/curriculum.py              simulated: no engine and no language model
    python tests/benchmarks/curriculum.py --real       the guess recipe on the real stack

Tasks are easy, right or impossible, a third each. Either arm leaves out groups without a signal: it drops
them, or has others played in their place (refill). Simulated is what samples and learns, a policy of eight
numbers with the advantages of GRPO and optimizer steps of 16 rollouts; which task comes next, which groups
an update takes and what is counted are the run's own code. An own result of each task begins to count in the
second pass over the tasks, so a run that ends in its first gains nothing.

Real: the guess recipe on 48 ranges, as many games that any guess wins, and as many that none does. Success is
that on held-out games, which are all of the right kind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import repository
from programs import trained, warm_started_model
from report import Report

from environments import Dataset
from environments.data.curriculum import Curriculum, Levels, RewardVariance, SuccessBand
from environments.text_games import GuessEnvironment
from launch.recipes import guess
from launch.reporting.tracker import read_metrics
from launch.workload import Workload
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from simulated_learner import EASY, IMPOSSIBLE, KINDS, RIGHT, SimulatedTraining, mixture

ARMS: dict[str, Callable[[], Curriculum | None]] = {
    "none": lambda: None,
    "success band": SuccessBand,
    "variance": RewardVariance,
    "levels": lambda: Levels(by="kind", order=(EASY, RIGHT, IMPOSSIBLE)),
}
CURRICULUM = "TROUPE_BENCHMARK_CURRICULUM"
"""Environment variable: the arm of a real run."""
SUCCESS, ZERO_SIGNAL = "eval/reward_mean", "stream/zero_signal_fraction"
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
NUM_RANGES = 48
RUN = [
    "recipe=guess",
    "run.checkpoints.every=4",
    "warm_start.num_steps=0",
    "evaluation.every=4",
    "evaluation.num_tasks=200",
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    f"rollout.group_size={GROUP_SIZE}",
    "learner.mini_batch_size=16",
    "learner.optimizer.lr=5e-4",
    "algorithm.entropy_coef=0",
    "algorithm.zero_signal_groups=drop",
]


# -- simulated -------------------------------------------------------------------------------------------


def num_rollouts(
    curriculum: Curriculum | None, treatment: str, tasks: Dataset, seed: int, success: float
) -> int:
    """Rollouts until the simulated policy has that success at the right tasks."""
    algorithm = resolve(AlgorithmConfig(zero_signal_groups=treatment), 64)
    with tempfile.TemporaryDirectory() as folder:
        training = SimulatedTraining(Path(folder), tasks, curriculum, algorithm, seed)
        return training.rollouts_until(success)


def print_simulation(num_seeds: int, success: float, num_tasks: int) -> None:
    report = Report(
        f"simulated: rollouts to a success of {success:g} at {num_tasks // 3} right tasks of {num_tasks}, "
        f"{num_seeds} seeds",
        ("groups without signal", "curriculum", "rollouts: mean", "least", "most", "ratio: mean", "worst"),
    )
    tasks = mixture(num_tasks)
    for treatment in ("drop", "refill"):
        without: list[int] = []
        for name, make in ARMS.items():
            found = [num_rollouts(make(), treatment, tasks, seed, success) for seed in range(num_seeds)]
            without = without or found
            ratios = [one / other for one, other in zip(found, without, strict=True)]
            numbers = f"{statistics.mean(found):.0f}", str(min(found)), str(max(found))
            report.add(treatment, name, *numbers, f"{statistics.mean(ratios):.2f}", f"{max(ratios):.2f}")
    report.print()


# -- real ------------------------------------------------------------------------------------------------


class MixedGuessEnvironment(GuessEnvironment):
    """The game; an easy one is won by any guess, an impossible one by none."""

    kind = RIGHT

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        answer, reward, done, info = super().step(action)
        if self.kind == RIGHT:
            return answer, reward, done, info
        return answer, float(self.kind == EASY), done or self.kind == EASY, info

    def is_correct(self) -> bool:
        return super().is_correct() if self.kind == RIGHT else self.kind == EASY

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> MixedGuessEnvironment:
        env = super().from_dict(info)
        env.kind = info.get("kind", RIGHT)
        return env


def workload(seed: int) -> Workload:
    """The guess recipe's on few ranges, with easy and impossible games beside them, and a curriculum."""
    given = guess.workload(seed)
    games = [
        {**task, "game": f"{kind} {index}", "kind": kind}
        for index, task in enumerate(given.train_dataset[:NUM_RANGES])
        for kind in KINDS
    ]
    return replace(
        given,
        env_class=MixedGuessEnvironment,
        train_dataset=Dataset(games),
        curriculum=ARMS[os.environ[CURRICULUM]](),
    )


def measure(model: str, directory: Path, arm: str, num_updates: int, seed: int) -> list[dict[str, float]]:
    """Train once; return the records of the run's updates and evaluations."""
    overrides = ["workload=curriculum", f"model.path={model}", f"seed={seed}", f"run.num_steps={num_updates}"]
    return read_metrics(Path(trained(directory, [*RUN, *overrides], {CURRICULUM: arm})))


def print_measurement(num_seeds: int, success: float, num_updates: int, folder: Path) -> None:
    report = Report(
        f"real: {num_updates} updates of {GROUPS_PER_STEP * GROUP_SIZE} rollouts, without those of no signal",
        ("curriculum", "seed", f"rollouts to {success:g}", "success: first", "last", "mean", "no signal"),
    )
    model = warm_started_model("guess", folder, num_steps=250)
    for seed in range(num_seeds):
        for arm in ("none", "success band"):
            records = measure(model, folder / f"{arm[:4]}-{seed}", arm, num_updates, seed)
            curve = [(int(each["step"]), each[SUCCESS]) for each in records if SUCCESS in each]
            points = " ".join(f"{step}:{value:.2f}" for step, value in curve)
            print(f"seed {seed}, {arm}: {points}", flush=True)
            reached = [step * GROUPS_PER_STEP * GROUP_SIZE for step, value in curve if value >= success]
            values = [value for _, value in curve]
            lost = [each[ZERO_SIGNAL] for each in records if ZERO_SIGNAL in each]
            shown = (values[0], values[-1], statistics.mean(values), statistics.mean(lost))
            least = str(min(reached)) if reached else "not reached"
            report.add(arm, str(seed), least, *(f"{value:.2f}" for value in shown))
    report.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm")
    parser.add_argument("--success", type=float, help="that is waited for; default: 0.85, real: 0.5")
    parser.add_argument("--tasks", type=int, default=192, help="of the simulation")
    parser.add_argument("--updates", type=int, default=60, help="of a real run")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and go on with those that were cut")
    parser.add_argument("--real", action="store_true", help="train the recipe on the real stack")
    arguments = parser.parse_args()
    if not arguments.real:
        print_simulation(arguments.seeds, arguments.success or 0.85, arguments.tasks)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        print_measurement(arguments.seeds, arguments.success or 0.5, arguments.updates, folder)


if __name__ == "__main__":
    main()
