"""Short word problems for SmolLM2-135M: it has to form the expression that it gives to the calculator.

Two worked examples are shown before each problem, both of the kind "left"; there are six kinds. No held-out
problem is trained on.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

from environments import Dataset, ToolEnvironment
from launch.recipes.calculator import task_from_message
from launch.recipes.smollm2 import ENV_ARGS, agent_args, worked_example
from launch.workload import Workload
from policies import ToolAgent

NUM_HELD_OUT = 200
NUM_PROBLEMS = 6000
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix")
THINGS = ("apples", "books", "cards", "coins", "pencils", "stones")


@dataclass(frozen=True)
class Kind:
    """One kind of problem: its text and its answer, from two numbers of which the first is larger."""

    text: str
    solve: Callable[[int, int], int]


KINDS = {
    "more": Kind(
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", operator.add
    ),
    "left": Kind("{name} had {a} {things} and gave away {b}. How many {things} are left?", operator.sub),
    "together": Kind(
        "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?", operator.add
    ),
    "boxes": Kind("There are {b} boxes with {a} {things} each. How many {things} are there?", operator.mul),
    "difference": Kind(
        "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have?", operator.sub
    ),
    "packs": Kind("{name} buys {b} packs of {a} {things}. How many {things} does {name} buy?", operator.mul),
}
EXAMPLES = [
    *worked_example("Eva had 40 nuts and ate 15. How many nuts are left?", "40-15", "25"),
    *worked_example("Otto had 93 eggs and broke 28. How many eggs are left?", "93-28", "65"),
]


def workload(seed: int) -> Workload:
    """Six kinds of problems with numbers from 12 to 99; the held-out ones are the same for every seed."""
    problems = make_problems()
    return Workload(
        agent_class=ToolAgent,
        env_class=ToolEnvironment,
        train_dataset=Dataset(problems[NUM_HELD_OUT:], name="word_problems", split="train").shuffle(seed),
        val_dataset=Dataset(problems[:NUM_HELD_OUT], name="word_problems", split="test"),
        agent_args=agent_args(EXAMPLES),
        env_args=ENV_ARGS,
        task_from_message=task_from_message,
        description="Solves a short word problem with a calculator. Answers in \\boxed{}.",
    )


def make_problems() -> list[dict[str, str]]:
    """Different problems, all kinds equally often, in an order that is always the same."""
    rng = random.Random(0)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < NUM_PROBLEMS:
        kind = list(KINDS)[len(problems) % len(KINDS)]
        problem = _problem(KINDS[kind], rng)
        problems.setdefault(problem["question"], problem | {"kind": kind})
    return list(problems.values())


def _problem(kind: Kind, rng: random.Random) -> dict[str, str]:
    smaller, larger = sorted(rng.sample(range(12, 100), 2))
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": rng.choice(THINGS)}
    return {
        "question": kind.text.format(a=larger, b=smaller, **words),
        "ground_truth": str(kind.solve(larger, smaller)),
    }
