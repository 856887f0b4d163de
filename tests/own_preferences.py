"""The calculator recipe with preferences: to call the tool and copy its answer, rather than to guess."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from environments import ToolEnvironment
from launch.recipes import calculator
from launch.recipes.demonstration import demonstrate
from launch.workload import Workload
from policies import ToolAgent
from policies.learning.preferences import Preference

NUM_PAIRS = 64


def workload(seed: int) -> Workload:
    recipe = calculator.workload(seed)
    rng = random.Random(seed)
    tasks = rng.sample(list(recipe.train_dataset), NUM_PAIRS)
    # Nothing is held out to be played: no engine has to start.
    return replace(recipe, val_dataset=None, preferences=[_preference(task, rng) for task in tasks])


def _preference(task: dict[str, str], rng: random.Random) -> Preference:
    expression = task["question"].removeprefix("What is ").removesuffix("?")
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    answer = f"\\boxed{{{task['ground_truth']}}}"
    chosen = _continuation(task, [f"<tool_call>\n{call}\n</tool_call>", answer])
    rejected = _continuation(task, [f"\\boxed{{{rng.randint(0, 9999)}}}"])
    size = next(index for index, message in enumerate(chosen) if message["role"] == "assistant")
    return Preference(messages=chosen[:size], chosen=chosen[size:], rejected=rejected[size:])


def _continuation(task: dict[str, str], replies: list[str]) -> list[dict[str, object]]:
    agent = ToolAgent(**calculator.AGENT_ARGS)
    env = ToolEnvironment.from_dict({**task, **calculator.ENV_ARGS})
    return demonstrate(agent, env, replies).messages
