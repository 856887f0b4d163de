"""Forked against flat groups at equal sampled tokens, on tasks where turns matter: success while it learns.

    python tests/benchmarks/forks.py [--seeds 5] [--tokens 6000]

The policy is a table, one token is a turn, and the update is plain gradient ascent: so a run takes seconds.
Groups, forks and credit are those of Troupe; engine, learner and templates take no part. ``maze``: 4 x 4
fields with walls, eight moves, 1 for the exit. ``calculator``: four steps in a row, each one of eight
operations, 1 if all are right, else a tenth for each right one before the first wrong one. Each row has the
best learning rate of three for it. "equal updates" are flat groups that sample about as many tokens as the
forked ones do; "equal members" are of as many members, and make fewer updates. The noise is the variance of a
group's gradient times the tokens that it samples, at one policy for all rows of a task. Takes five minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import repository
from report import Report

from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from forked_world import Draw, Path, Policy, Shape, World, combined, distance, gradients, num_sampled

MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))
WALLS = {(1, 1), (1, 2), (3, 1)}
EXIT, SIDE = (3, 3), 4
RIGHT = (3, 1, 4, 1)
"""The operations that solve the task ``calculator``."""
GROUPS_PER_STEP = 4
RATES = (10.0, 30.0, 100.0)
RLOO = resolve(AlgorithmConfig(name="rloo"), 12)
NUM_POINTS = 10
STUDENT = {3: 4.303, 5: 2.776, 8: 2.365, 10: 2.262}
"""Quantiles of the t distribution by the number of seeds, for 95 %."""


def field(path: Path) -> tuple[int, int]:
    """The field of the maze after these moves: a wall stops one."""
    x = y = 0
    for move in path:
        after = (x + MOVES[move][0], y + MOVES[move][1])
        if after not in WALLS and 0 <= after[0] < SIDE and 0 <= after[1] < SIDE:
            x, y = after
    return x, y


def num_right(path: Path) -> int:
    """Operations before the first wrong one."""
    return next((turn for turn, one in enumerate(path) if one != RIGHT[turn]), len(path))


def partly_right(path: Path) -> float:
    return 1.0 if num_right(path) == len(RIGHT) else 0.1 * num_right(path)


WORLDS = {
    "maze": World(4, 8, lambda path: field(path) == EXIT, lambda path: float(field(path) == EXIT), field),
    "calculator": World(8, 4, lambda path: False, partly_right),
}
SHAPES = {
    "maze": {"forked": Shape(8, 2, "every 2"), "equal updates": Shape(5, 5), "equal members": Shape(8, 8)},
    "calculator": {"forked": Shape(8, 2), "equal updates": Shape(5, 5), "equal members": Shape(8, 8)},
}


def expected_reward(policy: Policy) -> float:
    """The policy's mean reward, exactly: by the places that it reaches, and how often."""
    world = policy.world
    reached: dict[object, tuple[Path, float]] = {world.state(()): ((), 1.0)}
    total = 0.0
    for _ in range(world.max_steps):
        following: dict[object, tuple[Path, float]] = {}
        for path, probability in reached.values():
            for action, share in enumerate(policy.probabilities(path)):
                after, mass = (*path, action), probability * float(share)
                if world.has_ended(after):
                    total += mass * world.reward(after)
                else:
                    first, before = following.get(world.state(after), (after, 0.0))
                    following[world.state(after)] = first, before + mass
        reached = following
    return total


def ascend(policy: Policy, shape: Shape, rate: float, rng: random.Random, algorithm: Algorithm = RLOO) -> int:
    """Make an update; return how many tokens were sampled for it."""
    groups = [shape.group(policy, drawn_by(rng), str(number)) for number in range(GROUPS_PER_STEP)]
    found = gradients(policy, groups, algorithm)
    step = combined([(rate / GROUPS_PER_STEP, each) for each in found.values()])
    for state, values in step.items():
        policy.logits[state] = policy.logits.get(state, np.zeros(policy.world.num_actions)) + values
    return num_sampled(groups)


def drawn_by(rng: random.Random) -> Draw:
    return lambda probabilities: rng.choices(range(len(probabilities)), probabilities)[0]


def learn(
    world: World, shape: Shape, rate: float, num_tokens: int, seed: int, algorithm: Algorithm = RLOO
) -> list[float]:
    """The expected reward after each tenth of ``num_tokens``."""
    rng, policy, used = random.Random(seed), Policy(world), 0
    curve: list[float] = []
    while len(curve) < NUM_POINTS:
        used += ascend(policy, shape, rate, rng, algorithm)
        while len(curve) < NUM_POINTS and used >= (len(curve) + 1) * num_tokens / NUM_POINTS:
            curve.append(expected_reward(policy))
    return curve


def halfway(world: World) -> Policy:
    """A policy that has learned from flat groups until its expected reward is a half."""
    rng, policy = random.Random(0), Policy(world)
    while expected_reward(policy) < 0.5:
        ascend(policy, Shape(8, 8), RATES[0], rng)
    return policy


def noise(policy: Policy, shape: Shape, num_groups: int = 400) -> float:
    """The variance of a group's gradient, times the tokens that it samples: less learns from fewer."""
    draw = drawn_by(random.Random(1))
    groups = [shape.group(policy, draw, str(number)) for number in range(num_groups)]
    found = list(gradients(policy, groups, RLOO).values())
    mean = combined([(1 / num_groups, each) for each in found])
    variance = statistics.mean(distance(each, mean) ** 2 for each in found)
    return variance * num_sampled(groups) / num_groups


def interval(values: Sequence[float]) -> str:
    """Mean and half width of its 95 % interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def best(
    world: World,
    shape: Shape,
    num_tokens: int,
    seeds: Sequence[int],
    algorithm: Algorithm = RLOO,
    rates: Sequence[float] = RATES,
) -> tuple[float, list[list[float]]]:
    """The learning rate with the highest mean over the curves, and the curves of the seeds."""
    curves = {
        rate: [learn(world, shape, rate, num_tokens, seed, algorithm) for seed in seeds] for rate in rates
    }
    rate = max(curves, key=lambda each: float(np.mean(curves[each])))
    return rate, curves[rate]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(STUDENT), help="runs of each row")
    parser.add_argument("--tokens", type=int, default=6_000, help="tokens that each run samples")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    report = Report(
        f"forks: expected reward at {arguments.tokens} sampled tokens, {arguments.seeds} seeds, 95 %",
        ("task and groups", "rate", "at the end", "on the way", "forked less this, on the way", "noise"),
    )
    for task, world in WORLDS.items():
        forked: list[float] = []
        policy = halfway(world)
        for name, shape in SHAPES[task].items():
            rate, curves = best(world, shape, arguments.tokens, seeds)
            way = [statistics.mean(curve) for curve in curves]
            forked = forked or way
            gain = "" if way is forked else interval([a - b for a, b in zip(forked, way, strict=True)])
            end = interval([curve[-1] for curve in curves])
            row = f"{task}, {name} ({shape.size} of {shape.roots})"
            report.add(row, f"{rate:g}", end, interval(way), gain, f"{noise(policy, shape):.3g}")
    report.print()


if __name__ == "__main__":
    main()
