"""Asynchronous against synchronous training where the environment is slow: wall time, score, who idles.

    python tests/benchmarks/async_training.py [--seeds 0,1,2] [--staleness 2] [--updates 60]
    python tests/benchmarks/async_training.py --simulate       what can be gained at all, without an engine

The guess recipe, whose environment here takes a log-normal time to answer (median 0.2 s, 95th percentile
2 s, cut at the 10 s after which a tool would be given up). Both arms have the same recipe, in which the ratio
of the loss is that to the policy that sampled (bypass), the same tasks, seeds, fleet, number of rollouts and
latencies: a member of a group has its own, drawn by the seed of the group and the number under which it came.
Wall time counts from the moment when the fleet is up until the last update; what the policy has learned is
measured afterwards, on all held-out games, four times each. Takes about 50 minutes for three seeds.

What to expect: an update waits for the slowest of its rollouts. With a staleness of K those that were ordered
together have the time of K + 1 updates, so nothing can gain more than K + 1. It gains less as some batches
have worse tails than others: a batch that takes twice as long as the next two is waited for all the same.
The simulation shows it, and that the fleet needs no more than two actors for each rollout of an update.

Its second table has the order of the tasks against that of completion, by the run's own ``Rollouts``. No
order that keeps the bound and drops nothing is faster than that of the tasks once a run is under way: there,
an update waits for exactly the groups that were requested K versions before, and they are due. Where dropped
groups are replaced, that order comes to groups that are not due yet, and waits for them all the same.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import repository
from programs import run, success, warm_started_model
from report import Report

from environments.text_games import GuessEnvironment
from launch.recipes import guess
from launch.reporting.tracker import read_metrics
from launch.workload import Workload

sys.path.insert(0, str(repository.ROOT / "tests"))
from simulated_rollouts import SimulatedRun

MEDIAN_SECONDS, SECONDS_95 = 0.2, 2.0
LONGEST_SECONDS = 10.0
FOLDER = "TROUPE_BENCHMARK_FOLDER"
"""Environment variable: where the members of each group draw their numbers."""

GROUPS_PER_STEP, GROUP_SIZE, NUM_ACTORS = 8, 8, 96
NUM_SIMULATED = 60
RUN = [
    "recipe=guess",
    "workload=async_training",
    "run.checkpoints.every=1000",
    "warm_start.num_steps=0",
    "evaluation.num_tasks=1",
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    f"rollout.group_size={GROUP_SIZE}",
    f"fleet.num_actors={NUM_ACTORS}",
    "learner.optimizer.lr=5e-4",
    "algorithm.entropy_coef=0.01",
    "algorithm.correction.level=bypass",
]


# -- the workload ----------------------------------------------------------------------------------------


class SlowGuessEnvironment(GuessEnvironment):
    """The game, with a pause before each answer. Held-out games, whose secret is given, have none."""

    _latencies: random.Random | None = None

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        if self._latencies is not None:
            time.sleep(latency(self._latencies))
        return super().step(action)

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> SlowGuessEnvironment:
        env = super().from_dict(info)
        if "secret" not in info:
            env._latencies = random.Random(f"{info['seed']}/{_draw_number(info['folder'], info['seed'])}")
        return env


def _draw_number(folder: str, seed: int) -> int:
    """How many members of the group ``seed`` were there before: environments do not know their member."""
    for number in itertools.count():
        try:
            os.close(os.open(os.path.join(folder, f"{seed}-{number}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number
    raise AssertionError("count() has no end")


def latency(rng: random.Random) -> float:
    """Seconds of one step."""
    sigma = math.log(SECONDS_95 / MEDIAN_SECONDS) / statistics.NormalDist().inv_cdf(0.95)
    return min(LONGEST_SECONDS, rng.lognormvariate(math.log(MEDIAN_SECONDS), sigma))


def workload(seed: int) -> Workload:
    """The guess recipe's, in the slow environment."""
    given = guess.workload(seed)
    env_args = {**given.env_args, "folder": os.environ[FOLDER]}
    return replace(given, env_class=SlowGuessEnvironment, env_args=env_args)


# -- what can be gained ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What a run is made of, for the simulation."""

    num_actors: int = NUM_ACTORS
    batch: int = GROUPS_PER_STEP * GROUP_SIZE
    """Rollouts of an update."""
    turns: int = 3
    sampling_seconds: float = 0.1
    """Of a turn, besides its latency."""
    update_seconds: float = 0.5


def simulate(sizes: Sizes, staleness: int, seed: int) -> float:
    """Seconds of ``NUM_SIMULATED`` updates whose rollouts are played and consumed in task order.

    The batch of an update is ordered when the weights of ``staleness`` updates before it are published.
    """
    rng = random.Random(seed)
    free_at = [0.0] * sizes.num_actors
    published = [0.0]
    for step in range(NUM_SIMULATED):
        ordered = published[max(0, step - staleness)]
        complete = 0.0
        for _ in range(sizes.batch):
            seconds = sum(latency(rng) + sizes.sampling_seconds for _ in range(sizes.turns))
            end = max(heapq.heappop(free_at), ordered) + seconds
            heapq.heappush(free_at, end)
            complete = max(complete, end)
        published.append(max(complete, published[-1]) + sizes.update_seconds)
    return published[-1]


def print_simulation() -> None:
    report = Report(
        f"simulation: {NUM_SIMULATED} updates, synchronous time over asynchronous, mean (least) of 10 seeds",
        ("actors per rollout of an update", "rollouts", "turns", "staleness 1", "2", "4"),
    )
    for turns, batch, share in itertools.product((1, 2, 3, 4), (32, 64, 96, 128), (1.0, 2.0)):
        sizes = Sizes(num_actors=int(share * batch), batch=batch, turns=turns)
        synchronous = [simulate(sizes, 0, seed) for seed in range(10)]
        gains = []
        for staleness in (1, 2, 4):
            each = [synchronous[seed] / simulate(sizes, staleness, seed) for seed in range(10)]
            gains.append(f"{statistics.mean(each):.2f} ({min(each):.2f})")
        report.add(f"{share:g}", str(batch), str(turns), *gains)
    report.print()


def print_orders() -> None:
    report = Report(
        f"simulation: {NUM_SIMULATED} updates, time in the order of the tasks over that of completion, mean "
        "(least) of 10 seeds",
        ("sigma of the durations", "replaced", "staleness 1", "2", "4"),
    )
    for sigma, share in itertools.product((0.5, 1.0, 1.5), (0.0, 0.1, 0.3, 0.5)):
        gains = []
        for staleness in (1, 2, 4):
            each = [order_gain(staleness, sigma, share, seed) for seed in range(10)]
            gains.append(f"{statistics.mean(each):.2f} ({min(each):.2f})")
        report.add(f"{sigma:g}", f"{share:.0%}", *gains)
    report.print()


def order_gain(staleness: int, sigma: float, replaced_share: float, seed: int) -> float:
    """Seconds of a run in the order of the tasks over those in the order of completion."""
    simulated = SimulatedRun(
        max_staleness=staleness,
        sigma=sigma,
        replaced_share=replaced_share,
        num_actors=NUM_ACTORS,
        num_updates=NUM_SIMULATED,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        seed=seed,
    )
    return simulated.play("tasks")[0] / simulated.play("completion")[0]


# -- the measurement -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One run: its wall seconds, its held-out success afterwards, and means over its updates."""

    seconds: float
    score: float
    means: dict[str, float]

    def mean(self, name: str) -> str:
        return f"{self.means[name]:.2f}"


def measure(model: str, folder: Path, num_updates: int, staleness: int, seed: int) -> Arm:
    """Train once."""
    directory, numbers = folder / f"staleness-{staleness}-{seed}", folder / f"numbers-{staleness}-{seed}"
    numbers.mkdir()
    overrides = [f"model.path={model}", f"seed={seed}", f"rollout.max_staleness={staleness}"]
    overrides.append(f"run.num_steps={num_updates}")
    program = run([*RUN, *overrides, f"run.directory={directory}"], {FOLDER: str(numbers)})
    updates = [each for each in read_metrics(directory) if "time/step" in each]
    means = {
        name: statistics.mean(each[name] for each in updates)
        for name in updates[0]
        if all(name in each for each in updates)
    }
    start, end = program.moment("Policy server:"), program.moment(f"{num_updates}/{num_updates}")
    means["time/engine_idle"] = program.engine_idle(start, end)
    score = success("guess", str(directory), directory / "evaluation")
    return Arm(end - start, score, means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="runs of each arm")
    parser.add_argument("--updates", type=int, default=60, help="of each run")
    parser.add_argument("--staleness", type=int, default=2, help="of the asynchronous arm")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    parser.add_argument("--simulate", action="store_true", help="only calculate what can be gained")
    arguments = parser.parse_args()
    if arguments.simulate:
        print_simulation()
        print_orders()
    else:
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.folder or Path(temporary)
            print_measurement(seeds, arguments.updates, arguments.staleness, folder)


def print_measurement(seeds: Sequence[int], num_updates: int, staleness: int, folder: Path) -> None:
    report = Report(
        f"asynchronous training: {num_updates} updates of {GROUPS_PER_STEP} groups of {GROUP_SIZE}, "
        f"{NUM_ACTORS} rollout actors",
        ("staleness", "seed", "seconds", "success", "idle: learner", "engine", "fleet", "stale", "most"),
    )
    arms: dict[int, list[Arm]] = {staleness: [], 0: []}  # the quick one first
    model = warm_started_model("guess", folder, num_steps=250)
    print(f"success before: {success('guess', model, folder / 'before'):.3f}", flush=True)
    for seed, each in itertools.product(seeds, arms):
        arm = measure(model, folder, num_updates, each, seed)
        arms[each].append(arm)
        idle = [arm.mean(f"time/{who}_idle") for who in ("learner", "engine", "fleet")]
        stale = [arm.mean(f"stream/staleness_{which}") for which in ("mean", "max")]
        report.add(str(each), str(seed), f"{arm.seconds:.0f}", f"{arm.score:.3f}", *idle, *stale)
        print(f"seed {seed}, staleness {each}: {arm.seconds:.0f} s, success {arm.score:.3f}", flush=True)
    report.print()
    pairs = zip(arms[0], arms[staleness], strict=True)
    ratios = [synchronous.seconds / other.seconds for synchronous, other in pairs]
    scores = [arm.score for arm in arms[0]]
    print(f"synchronous over asynchronous: {' '.join(f'{ratio:.2f}' for ratio in ratios)}, ", end="")
    print(f"mean {statistics.mean(ratios):.2f}")
    print(f"success: synchronous {min(scores):.3f} to {max(scores):.3f}, asynchronous ", end="")
    print(" ".join(f"{arm.score:.3f}" for arm in arms[staleness]))


if __name__ == "__main__":
    main()
