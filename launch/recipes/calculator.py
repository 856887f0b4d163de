"""Two-digit sums and products with a calculator at hand: the agent learns to call the tool, not to guess.

The demonstrations that call the tool show all that there is to learn: supervised learning on them alone
solves the task. Reinforcement finds out which of the two ways of the demonstrations pays.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from environments import Dataset, ToolEnvironment, math_reward_fn
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate, written_call
from launch.workload import Workload
from policies import ToolAgent

OPERATORS = ("+", "*")
NUM_HELD_OUT = 200
NUM_DEMONSTRATIONS = 4000
TOOL_SHARE = 0.4
"""Share of the demonstrations that call the tool; the others guess."""

AGENT_ARGS: dict[str, Any] = {
    "system_prompt": "Give the final answer in \\boxed{}.",
    "parser_name": "hermes-brief",
    "tools": ["calculator"],
}
ENV_ARGS: dict[str, Any] = {"tools": ["calculator"], "reward_fn": math_reward_fn}
Script = tuple[dict[str, str], list[str]]
"""A task, and what the model says to it."""


class CalculatorEnvironment(ToolEnvironment):
    """An episode or a conversation whose process has died goes on: the calculator always answers the same."""

    resumes_by = "replay"


def workload(seed: int) -> Workload:
    """All problems with two-digit operands; the held-out ones are the same for every seed."""
    held_out, rest = split_problems()
    return Workload(
        agent_class=ToolAgent,
        env_class=CalculatorEnvironment,
        train_dataset=Dataset(rest, name="calculator", split="train").shuffle(seed),
        val_dataset=Dataset(held_out, name="calculator", split="test"),
        agent_args=AGENT_ARGS,
        env_args=ENV_ARGS,
        demonstrations=demonstrations(seed),
        task_from_message=task_from_message,
        description="Works out sums and products with a calculator. Answers in \\boxed{}.",
    )


def task_from_message(message: str) -> dict[str, str]:
    """A client's question as a task. Its answer is unknown, and the reward is not looked at."""
    return {"question": message, "ground_truth": "0"}


def demonstrations(seed: int) -> Demonstrations[Script]:
    """Answers to problems of the training set, with the tool and without it."""
    rng = random.Random(seed)
    _, problems = split_problems()
    return Demonstrations(_play, [_script(rng.choice(problems), rng) for _ in range(NUM_DEMONSTRATIONS)])


def split_problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The held-out problems and the others."""
    problems = [_problem(*each) for each in itertools.product(range(10, 100), OPERATORS, range(10, 100))]
    random.Random(0).shuffle(problems)
    return problems[:NUM_HELD_OUT], problems[NUM_HELD_OUT:]


def _problem(a: int, operator: str, b: int) -> dict[str, str]:
    expression = f"{a}{operator}{b}"
    return {"question": f"What is {expression}?", "ground_truth": str(a + b if operator == "+" else a * b)}


def _script(task: dict[str, str], rng: random.Random) -> Script:
    """Call the tool and copy its answer, or box a guess."""
    if rng.random() >= TOOL_SHARE:
        guess = rng.randint(-99, 999) if rng.random() < 0.5 else rng.randint(0, 9999)
        replies = [f"\\boxed{{{guess}}}"]
    else:
        expression = task["question"].removeprefix("What is ").removesuffix("?")
        call = written_call("calculator", expression=expression)
        replies = [call, f"\\boxed{{{task['ground_truth']}}}"]
    return task, replies


def _play(script: Script) -> Demonstration:
    task, replies = script
    return demonstrate(ToolAgent(**AGENT_ARGS), ToolEnvironment.from_dict({**task, **ENV_ARGS}), replies)
