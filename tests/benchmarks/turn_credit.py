"""Credit by turns against credit by trajectories, where turns matter: success, and the gradient's error.

    python tests/benchmarks/turn_credit.py [--only maze] [--seeds 5] [--tokens 2500]

The tasks, the policy in a table and the plain gradient ascent are those of ``forks.py``, with flat groups
of eight and four groups an update; each row has the best learning rate of three for it. In the maze a
member comes back to a field, and others stand on it in another turn. In the calculator a state is the
operations so far, so that equal states are those of the same turn; the graded one earns a quarter in each
turn up to the first wrong one. At one policy, which is right half of the time: the direction is the cosine
between the mean gradient of 100 groups and the exact gradient of the expected reward, 1 where there is no
bias but for the noise that is left; the noise is the variance of a group's gradient by the squared length
of that mean. No engine, model or template takes part. Takes ten minutes of a core.
"""

from __future__ import annotations

import argparse
import random
import statistics

import numpy as np
import repository  # noqa: F401
from forks import STUDENT, WORLDS, best, drawn_by, halfway, interval, num_right
from report import Report

from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

# isort: split
from forked_world import (  # ``forks`` adds its folder
    Gradient,
    Policy,
    Shape,
    World,
    combined,
    distance,
    exact_gradient,
    gradients,
    length,
)

FLAT = Shape(8, 8)
RAW = {"normalize_by_std": False}
ROWS: dict[str, AlgorithmConfig] = {
    "grpo": AlgorithmConfig(name="grpo"),
    "grpo, per_step": AlgorithmConfig(name="grpo", credit="per_step", gamma=0.95),
    "mt_grpo": AlgorithmConfig(name="mt_grpo"),
    "gigpo": AlgorithmConfig(name="gigpo"),
    "no deviation: grpo": AlgorithmConfig(name="grpo", options=RAW),
    "no deviation: gigpo": AlgorithmConfig(name="gigpo", options=RAW),
}
TASKS = {
    **WORLDS,
    "graded calculator": World(8, 4, lambda path: False, lambda path: num_right(path) / 4, by_turn=True),
}
NUM_GROUPS = 100
LEARNING_RATES = (20.0, 60.0, 180.0)


def direction_and_noise(policy: Policy, exact: Gradient, algorithm: Algorithm) -> tuple[float, float]:
    """The cosine of the mean gradient with the exact one, and the variance by that mean's squared length."""
    draw = drawn_by(random.Random(1))
    groups = [FLAT.group(policy, draw, str(number)) for number in range(NUM_GROUPS)]
    found = list(gradients(policy, groups, algorithm).values())
    mean = combined([(1 / NUM_GROUPS, each) for each in found])
    product = sum(float(np.sum(mean[state] * exact[state])) for state in mean.keys() & exact.keys())
    variance = statistics.mean(distance(each, mean) ** 2 for each in found)
    return product / length(mean) / length(exact), variance / length(mean) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(TASKS), help="some of: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(STUDENT), help="runs of each row")
    parser.add_argument("--tokens", type=int, default=2_500, help="tokens that each run samples")
    arguments = parser.parse_args()
    report = Report(
        f"turn credit: expected reward at {arguments.tokens} sampled tokens, {arguments.seeds} seeds, 95 %",
        (
            "task and credit",
            "rate",
            "at the end",
            "on the way",
            "less grpo's, on the way",
            "direction",
            "noise",
        ),
    )
    seeds = range(arguments.seeds)
    for task in arguments.only.split(","):
        world = TASKS[task]
        policy = halfway(world)
        exact = exact_gradient(policy)
        first: list[float] = []
        for name, config in ROWS.items():
            algorithm = resolve(config, world.max_steps)
            rate, curves = best(world, FLAT, arguments.tokens, seeds, algorithm, LEARNING_RATES)
            way = [statistics.mean(curve) for curve in curves]
            first = first or way
            gain = "" if way is first else interval([a - b for a, b in zip(way, first, strict=True)])
            errors = (f"{each:.3f}" for each in direction_and_noise(policy, exact, algorithm))
            end = interval([curve[-1] for curve in curves])
            report.add(f"{task}, {name}", f"{rate:g}", end, interval(way), gain, *errors)
            print(f"{task}, {name}: {end}, {interval(way)}, {gain}", flush=True)
    report.print()


if __name__ == "__main__":
    main()
