"""A fleet that follows its load against fleets of a fixed size, where the load changes: updates a second.

    python tests/benchmarks/elastic_fleet.py [--fixed 8,16,32] [--plot elastic_fleet.png]

The guess recipe, whose environment answers at once in some phases, so that the learner holds the run up,
and after half a second in others, so that the rollouts do. The phases take turns. The learning rate is 0:
games stay as long as they are. Each size, and the fleet that chooses between the smallest and the
largest, plays the same tasks. The table has the seconds of an update and the actors at the end of each
phase, and the share of the best fixed size's speed that the elastic fleet reached: over the whole phase,
and over its second half, when it has had the time to grow or to shrink. Takes about 25 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from programs import run, warm_started_model
from report import Report

from environments import Dataset
from environments.text_games import GuessEnvironment
from launch.recipes import guess
from launch.reporting.tracker import read_metrics
from launch.training.rollout_requests import epoch_order
from launch.workload import Workload

PAUSES = (0.0, 0.5, 0.0)
"""Seconds before each answer of the environment, by phase."""
PHASE_UPDATES, GROUPS_PER_STEP, GROUP_SIZE = 70, 4, 4
RUN = [
    "recipe=guess",
    "workload=elastic_fleet",
    f"run.num_steps={PHASE_UPDATES * len(PAUSES)}",
    "run.checkpoints.every=1000",
    "run.trajectories_kept=0",
    "warm_start.num_steps=0",
    "evaluation.num_tasks=1",
    "rollout.max_staleness=1",
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    f"rollout.group_size={GROUP_SIZE}",
    "learner.optimizer.lr=0",
    "learner.mini_batch_size=1",
]


class PausingGuessEnvironment(GuessEnvironment):
    """The game, with a pause before each answer that its task chooses."""

    _pause = 0.0

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(self._pause)
        return super().step(action)

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> PausingGuessEnvironment:
        env = super().from_dict(info)
        env._pause = info.get("pause", 0.0)
        return env


def workload(seed: int) -> Workload:
    """The guess recipe's, with as many tasks as the run plays, each with the pause of its phase.

    A run shuffles its tasks, so they lie where the shuffle finds those of the first phase first.
    """
    given = guess.workload(seed)
    per_phase = PHASE_UPDATES * GROUPS_PER_STEP
    num_tasks = per_phase * len(PAUSES)
    tasks = [given.train_dataset[index] for index in range(num_tasks)]
    for place, index in enumerate(epoch_order(Dataset(tasks), None, seed, epoch=0)):
        tasks[index] = {**tasks[index], "pause": PAUSES[place // per_phase]}
    return replace(given, env_class=PausingGuessEnvironment, train_dataset=Dataset(tasks, name="guess"))


@dataclass(frozen=True)
class Arm:
    """One run: seconds and number of actors by update."""

    seconds: Sequence[float]
    actors: Sequence[float]

    def phase(self, number: int, second_half: bool = False) -> slice:
        """The updates of a phase, or of its second half."""
        first = PHASE_UPDATES * number
        return slice(first + second_half * PHASE_UPDATES // 2, first + PHASE_UPDATES)

    @property
    def num_turns(self) -> int:
        """How often the number of actors went up after it went down, or the other way round."""
        changes = [after - before for before, after in itertools.pairwise(self.actors)]
        signs = [change > 0 for change in changes if change]
        return sum(one != other for one, other in itertools.pairwise(signs))


def measure(model: str, directory: Path, fleet: Sequence[str]) -> Arm:
    """Train once."""
    run([*RUN, *fleet, f"model.path={model}", f"run.directory={directory}"])
    updates = [each for each in read_metrics(directory) if "time/step" in each]
    return Arm([each["time/step"] for each in updates], [each["stream/actors"] for each in updates])


def draw(arms: Mapping[str, Arm], path: Path) -> None:
    """Speed and size over the updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, size) = plt.subplots(2, 1, sharex=True, figsize=(8, 5))
    for name, arm in arms.items():
        steps = range(1, len(arm.seconds) + 1)
        mean = [statistics.fmean(arm.seconds[max(0, step - 5) : step]) for step in steps]
        width = 2.0 if name == "elastic" else 1.0
        speed.plot(steps, [1 / seconds for seconds in mean], label=name, linewidth=width)
        size.plot(steps, arm.actors, linewidth=width)
    for axes in (speed, size):
        for number, pause in enumerate(PAUSES):
            if pause:
                axes.axvspan(number * PHASE_UPDATES, (number + 1) * PHASE_UPDATES, color="#eeeeee")
    speed.set_ylabel("updates a second\n(mean of 5)")
    size.set_ylabel("rollout actors")
    size.set_xlabel("update; in grey: the environment takes half a second for each answer")
    speed.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fixed", default="8,16,32", help="sizes of the fixed fleets")
    parser.add_argument("--plot", type=Path, help="draw speed and size over the updates into this file")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.fixed.split(",")]
    bounds = {"num": min(sizes), "min": min(sizes), "max": max(sizes)}
    elastic = [f"fleet.{name}_actors={number}" for name, number in bounds.items()]
    fleets = {str(size): [f"fleet.num_actors={size}"] for size in sizes} | {"elastic": elastic}
    report = Report(
        f"seconds of an update of {GROUPS_PER_STEP} groups of {GROUP_SIZE}, by the environment's pause",
        ("rollout actors", *[f"{pause:g} s" for pause in PAUSES], "turns"),
    )
    arms = {}
    with tempfile.TemporaryDirectory() as temporary:
        model = warm_started_model("guess", Path(temporary), num_steps=100)
        for name, fleet in fleets.items():
            arms[name] = measure(model, Path(temporary) / name, fleet)
            print(f"{name}: {sum(arms[name].seconds):.0f} s", flush=True)
    for name, arm in arms.items():
        seconds = [statistics.fmean(arm.seconds[arm.phase(number)]) for number in range(len(PAUSES))]
        ends = [int(arm.actors[arm.phase(number)][-1]) for number in range(len(PAUSES))]
        cells = [f"{mean:.2f} ({actors})" for mean, actors in zip(seconds, ends, strict=True)]
        report.add(name, *cells, str(arm.num_turns))
    for label, second_half in (("share of the best", False), ("of its second half", True)):
        shares = []
        for number in range(len(PAUSES)):
            part = arms["elastic"].phase(number, second_half)
            best = min(statistics.fmean(arms[str(size)].seconds[part]) for size in sizes)
            shares.append(f"{best / statistics.fmean(arms['elastic'].seconds[part]):.2f}")
        report.add(label, *shares, "")
    report.print()
    if arguments.plot:
        draw(arms, arguments.plot)


if __name__ == "__main__":
    main()
