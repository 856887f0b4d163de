"""What each algorithm learns at a rate of its own, and what staleness and its corrections do to one of them.

    python tests/benchmarks/evidence/algorithms.py [--only grpo,ppo] [--seeds 0,1,2] [--minutes 110]

The task is the recipe ``guess``: four tries at a number, in ranges that neither training nor demonstrations
have. All runs begin with one model, which knows the recipe's demonstrations alone. A run makes 16 updates of
8 groups of 8 rollouts, with two optimizer steps each, at a constant rate; then every secret of the 100
held-out ranges is played twice, 1,800 games.

A rate is tuned on a seed that is not among the others: the best of those a factor of 3.16 apart, where both
neighbours are worse. Staleness and corrections: ``grpo`` at its rate, sampled by the version that is just so
many updates old. A run is one of ``one_process.py``: the library's engine, rollouts, credit and learner
without Ray between them, 12 to 20 CPU seconds. A finished one is kept in ``algorithms.json``, and a second
call goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import repository  # noqa: E402, F401
from learning_curve_plots import Summary  # noqa: E402
from programs import warm_started_model  # noqa: E402
from report import Report  # noqa: E402

from environments.disk import replaced  # noqa: E402
from launch.recipes.guess import split_ranges, workload  # noqa: E402
from launch.run_folder.model_paths import model_folder  # noqa: E402
from launch.settings.compose import compose  # noqa: E402
from launch.validation.settings import check_training_settings  # noqa: E402
from policies.learning.algorithms import ALGORITHMS  # noqa: E402

UPDATES = 16
SETTINGS = [
    "recipe=guess",
    "stages=[reinforce]",
    "rollout.group_size=8",
    f"run.num_steps={UPDATES}",
    "algorithm.clip_high=null",  # the recipe's is for GRPO: each has its paper's
    "algorithm.entropy_coef=0",
]
OWN_SETTINGS = {"ppo": ["learner.critic.lr=1e-3"]}
SIX = ("grpo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce_plus_plus")
STALE, STALENESS, CORRECTIONS = "grpo", (2, 8), ("none", "token", "sequence", "bypass")
TUNING_SEED, FIRST_RATE = 100, -7
"""A rate is named by its index: 10 to the power of half of it."""
TIMES = 2
"""Games of each held-out secret."""
Kept = dict[str, dict[str, Any]]
"""Finished runs by their names."""


@dataclass(frozen=True)
class Arm:
    """What is compared."""

    algorithm: str
    staleness: int = 0
    correction: str = "none"

    def __str__(self) -> str:
        return self.algorithm + (f", {self.staleness} old, {self.correction}" if self.staleness else "")


@dataclass(frozen=True)
class Run:
    """One training."""

    arm: Arm
    rate: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}, rate {rate_of(self.rate)}, seed {self.seed}"

    @property
    def settings(self) -> list[str]:
        """Its settings, but for the model."""
        arm = self.arm
        stale = [f"rollout.max_staleness={arm.staleness}", f"algorithm.correction.level={arm.correction}"]
        return [
            *SETTINGS,
            *OWN_SETTINGS.get(arm.algorithm, []),
            *(stale if arm.staleness else []),
            f"algorithm.name={arm.algorithm}",
            f"learner.optimizer={{lr: {rate_of(self.rate)}, warmup_steps: 0, min_lr_ratio: 1.0}}",
            f"seed={self.seed}",
        ]


def rate_of(index: int) -> str:
    """The learning rate of an index."""
    return f"{10 ** (index / 2):.1e}"


def arms(algorithms: Sequence[str]) -> Iterator[Arm]:
    """Each algorithm, and one of them with staleness and corrections."""
    yield from map(Arm, algorithms)
    if STALE in algorithms:
        yield from (Arm(STALE, *how) for how in product(STALENESS, CORRECTIONS))


def tuning(kept: Kept, algorithm: str) -> dict[int, float]:
    """Success of the runs that tune an algorithm, by the index of their rate."""
    runs = {rate: Run(Arm(algorithm), rate, TUNING_SEED).name for rate in range(-14, 1)}
    return {rate: kept[name]["success"] for rate, name in runs.items() if name in kept}


def tuned(found: dict[int, float]) -> tuple[int, bool]:
    """The rate to try next, or the best one, and whether it is this."""
    if not found:
        return FIRST_RATE, False
    best = max(found, key=lambda rate: found[rate])
    untried = next((rate for rate in (best + 1, best - 1) if rate not in found), None)
    return (best, True) if untried is None else (untried, False)


def next_run(kept: Kept, algorithms: Sequence[str], seeds: Sequence[int]) -> Run | None:
    """The run that comes next: tuning first, then one seed of all after the other."""
    rates = {}
    for algorithm in algorithms:
        rates[algorithm], is_tuned = tuned(tuning(kept, algorithm))
        if not is_tuned:
            return Run(Arm(algorithm), rates[algorithm], TUNING_SEED)
    runs = (Run(arm, rates[arm.algorithm], seed) for seed, arm in product(seeds, arms(algorithms)))
    return next((run for run in runs if run.name not in kept), None)


class Trainings:
    """Makes the runs, all of them with one engine."""

    def __init__(self, model: str) -> None:
        import one_process

        self._parts, self._model = one_process, model
        limits = compose(SETTINGS).rollout.limits()
        self._player = one_process.Player(model, workload(0), limits)
        games = [
            {"low": low, "high": high, "secret": secret}
            for low, high in split_ranges()[0]
            for secret in range(low, high + 1)
        ]
        self._games = [
            one_process.request(f"held-out {index}", str(number), game, seed=0)
            for index, game in enumerate(games)
            for number in range(TIMES)
        ]

    def success(self) -> float:
        """The share of the held-out games that are won by the weights that were loaded last."""
        return statistics.fmean(each.reward for each in self._player.play(self._games))

    def make(self, run: Run) -> dict[str, Any]:
        """Make a run."""
        start, rewards = time.process_time(), []
        config = compose(run.settings)
        check_training_settings(config)
        for reward in self._parts.train(config, workload(run.seed), self._model, self._player):
            rewards.append(round(reward, 3))
        success = round(self.success(), 4)
        seconds = round(time.process_time() - start, 1)
        return {"success": success, "rewards": rewards, "cpu_seconds": seconds}


def finished(kept: Kept, algorithms: Sequence[str], seeds: Sequence[int]) -> dict[Arm, dict[int, float]]:
    """Success by arm and seed."""
    found = {}
    for arm in arms(algorithms):
        rate, _ = tuned(tuning(kept, arm.algorithm))
        runs = {seed: kept.get(Run(arm, rate, seed).name) for seed in seeds}
        found[arm] = {seed: run["success"] for seed, run in runs.items() if run is not None}
    return {arm: values for arm, values in found.items() if values}


def report(found: dict[Arm, dict[int, float]], kept: Kept) -> None:
    """Print success after the last update, and what it is more than that of fresh ``STALE``."""
    table = Report(
        f"held-out success after {UPDATES} updates, mean ± 95 %; {kept['before']['success']} before",
        ("arm", "rate", "seeds", "success", f"more than {STALE}"),
    )
    first = found.get(Arm(STALE), {})
    for arm, values in found.items():
        gaps = [value - first[seed] for seed, value in values.items() if seed in first]
        more = Summary.of(gaps) if gaps and arm != Arm(STALE) else None
        rate = rate_of(tuned(tuning(kept, arm.algorithm))[0])
        one = Summary.of(list(values.values()))
        gap = f"{more.mean:+.3f} ± {more.margin:.3f}" if more else ""
        table.add(str(arm), rate, str(len(values)), f"{one.mean:.3f} ± {one.margin:.3f}", gap)
    table.print()


def draw(found: dict[Arm, dict[int, float]], before: float, path: Path) -> None:
    """Each seed as a dot, the mean with its 95 % interval beside them; staleness and corrections below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, (arm, values) in enumerate(found.items()):
        one, color = Summary.of(list(values.values())), "#8e5ea2" if arm.staleness else "#2a6fb0"
        axes.plot(list(values.values()), [place + 0.15] * len(values), ".", color=color, alpha=0.5)
        margin = one.margin if len(values) > 1 else 0.0
        axes.errorbar(one.mean, place - 0.15, xerr=margin, fmt="o", color=color, capsize=3)
    axes.axvline(before, color="#777777", linestyle="--", linewidth=1.2, label="before the first update")
    axes.set_yticks(range(len(found)), list(map(str, found)))
    axes.invert_yaxis()
    axes.set_xlim(right=1.02)
    axes.set_xlabel(f"held-out success after {UPDATES} updates")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(SIX), help=f"some of: {', '.join(ALGORITHMS)}")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"), help="of the first model")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the JSON and the picture")
    parser.add_argument("--minutes", type=float, default=110, help="no run is begun after so many")
    arguments = parser.parse_args()
    algorithms, seeds = arguments.only.split(","), [int(seed) for seed in arguments.seeds.split(",")]
    until = time.monotonic() + 60 * arguments.minutes
    path = arguments.output / "algorithms.json"
    kept: Kept = {}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["settings"] != SETTINGS:
            sys.exit(f"{path} holds runs of other settings: move it away, or name another --output.")
        kept = content["runs"]
    trainings = None
    while time.monotonic() < until and (run := next_run(kept, algorithms, seeds)) is not None:
        if trainings is None:
            folder = arguments.folder.absolute()
            trainings = Trainings(model_folder(warm_started_model("guess", folder, num_steps=250)))
            kept.setdefault("before", {"success": round(trainings.success(), 4)})
        kept[run.name] = trainings.make(run) | {"load": round(os.getloadavg()[0], 1)}
        with replaced(path) as unfinished:
            unfinished.write_text(json.dumps({"settings": SETTINGS, "runs": kept}), encoding="utf-8")
        print(run.name, kept[run.name]["success"], kept[run.name]["cpu_seconds"], flush=True)
    if found := finished(kept, algorithms, seeds):
        draw(found, kept["before"]["success"], arguments.output / "algorithms.png")
        report(found, kept)
    sys.stdout.flush()
    os._exit(0)  # the engine's thread has no end


if __name__ == "__main__":
    main()
