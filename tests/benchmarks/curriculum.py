"""Rollouts to the same success with and without a curriculum, where a third of the tasks teaches something.

    python tests/benchmarks/curriculum.py              simulated: no engine and no language model
    python tests/benchmarks/curriculum.py --real       the guess recipe, by engine and learner in one process

Tasks are easy, right or impossible, a third each. Either arm leaves out groups without a signal: it drops
them, or has others played in their place (refill). Simulated is what samples and learns, a policy of eight
numbers with the advantages of GRPO and optimizer steps of 16 rollouts; which task comes next, which groups
an update takes and what is counted are the run's own code. An own result of each task begins to count in the
second pass over the tasks, so a run that ends in its first gains nothing.

Real: the guess recipe on a few ranges, as many games that any guess wins, and as many that none does; one
warm-started model for all runs, by ``one_process.py``. Success is that on the recipe's 200 held-out games,
which are all of the right kind, after each ``EVERY`` updates. Finished runs are kept in the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import repository
from programs import warm_started_model
from report import Report

from environments import Dataset
from environments.data.curriculum import Curriculum, Levels, RewardVariance, SuccessBand
from environments.text_games import GuessEnvironment
from launch.recipes import guess
from launch.run_folder.model_paths import model_folder
from launch.settings.compose import compose
from launch.workload import Workload
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from simulated_learner import EASY, IMPOSSIBLE, KINDS, RIGHT, SimulatedTraining, mixture

Curve = dict[int, float]
"""Success on held-out tasks by the updates before."""
ARMS: dict[str, Callable[[], Curriculum | None]] = {
    "none": lambda: None,
    "success band": SuccessBand,
    "variance": RewardVariance,
    "levels": lambda: Levels(by="kind", order=(EASY, RIGHT, IMPOSSIBLE)),
}
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
NUM_RANGES = 24
EVERY = 3
RUN = [
    "recipe=guess",
    "stages=[reinforce]",
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    f"rollout.group_size={GROUP_SIZE}",
    "learner.mini_batch_size=16",
    "learner.optimizer={lr: 1e-4, warmup_steps: 0, min_lr_ratio: 1.0}",
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


def print_simulation(seeds: Sequence[int], success: float, num_tasks: int) -> None:
    report = Report(
        f"simulated: rollouts to a success of {success:g} at {num_tasks // 3} right tasks of {num_tasks}, "
        f"{len(seeds)} seeds",
        ("groups without signal", "curriculum", "rollouts: mean", "least", "most", "ratio: mean", "worst"),
    )
    tasks = mixture(num_tasks)
    for treatment in ("drop", "refill"):
        without: list[int] = []
        for name, make in ARMS.items():
            found = [num_rollouts(make(), treatment, tasks, seed, success) for seed in seeds]
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


def workload(seed: int, curriculum: Curriculum | None = None) -> Workload:
    """The guess recipe's on few ranges, with easy and impossible games beside them."""
    given = guess.workload(seed)
    games = [
        {**task, "game": f"{kind} {index}", "kind": kind}
        for index, task in enumerate(given.train_dataset[:NUM_RANGES])
        for kind in KINDS
    ]
    tasks = Dataset(games).shuffle(seed)
    return replace(given, env_class=MixedGuessEnvironment, train_dataset=tasks, curriculum=curriculum)


def curves(model: str, runs: Iterable[tuple[int, str]], num_updates: int, success: float) -> Iterator[Curve]:
    """Of each run, a seed and an arm, the success by updates, until it is reached."""
    import one_process

    player = one_process.Player(model, workload(0), compose(RUN).rollout.limits())
    held_out = [
        one_process.request(f"held-out {number}", "0", game, seed=0)
        for number, game in enumerate(workload(0).val_dataset or ())
    ]
    for seed, arm in runs:
        config, curve = compose([*RUN, f"seed={seed}", f"run.num_steps={num_updates}"]), Curve()
        training = one_process.train(config, workload(seed, ARMS[arm]()), model, player)
        for update, _ in enumerate(training):  # the player has the policy that has sampled the update
            if update % EVERY == 0:
                curve[update] = statistics.fmean(each.reward for each in player.play(held_out))
                if curve[update] >= success:
                    break
        yield curve


def print_measurement(seeds: Sequence[int], success: float, num_updates: int, folder: Path) -> None:
    kept_in = folder / "curves.json"
    kept: dict[str, Curve] = json.loads(kept_in.read_text()) if kept_in.exists() else {}
    runs = [(seed, arm) for seed in seeds for arm in ("none", "success band")]
    left = [(seed, arm) for seed, arm in runs if f"{seed}, {arm}" not in kept]
    model = model_folder(warm_started_model("guess", folder, num_steps=250))
    found = curves(model, left, num_updates, success) if left else ()
    for (seed, arm), curve in zip(left, found, strict=True):
        kept[f"{seed}, {arm}"] = curve
        kept_in.write_text(json.dumps(kept))
        points = " ".join(f"{update}:{value:.3f}" for update, value in curve.items())
        print(f"seed {seed}, {arm}: {points}", flush=True)
    report = Report(
        f"real: rollouts to {success:g}, {GROUPS_PER_STEP * GROUP_SIZE} an update",
        ("seed", "success: before", "no curriculum", "success band", "ratio"),
    )
    for seed in seeds:
        without, banded = (list(kept[f"{seed}, {arm}"].items()) for arm in ("none", "success band"))
        reached = [
            GROUPS_PER_STEP * GROUP_SIZE * int(update) if value >= success else math.nan
            for update, value in (without[-1], banded[-1])
        ]
        shown = [f"{number:.0f}" for number in reached]
        report.add(str(seed), f"{without[0][1]:.3f}", *shown, f"{reached[1] / reached[0]:.2f}")
    report.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5), help="a run of each arm for each")
    parser.add_argument("--success", type=float, help="that is waited for; default: 0.85, real: 0.9")
    parser.add_argument("--tasks", type=int, default=192, help="of the simulation")
    parser.add_argument("--updates", type=int, default=60, help="of a real run")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and go on with those that were cut")
    parser.add_argument("--real", action="store_true", help="train the recipe")
    arguments = parser.parse_args()
    if not arguments.real:
        print_simulation(arguments.seeds, arguments.success or 0.85, arguments.tasks)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        print_measurement(arguments.seeds, arguments.success or 0.9, arguments.updates, folder.absolute())
    sys.stdout.flush()
    os._exit(0)  # the engine's thread has no end


if __name__ == "__main__":
    main()
