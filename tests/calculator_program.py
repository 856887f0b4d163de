"""The calculator, solved by a program of others: a workload for ``benchmarks/trained_programs.py``.

A variable of the environment names the program, another the socket at which ``outside_programs.py`` answers.
Plain clients run in the rollout actor.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import own_rollout

from actors.gateway.client import PolicyClient
from environments import math_reward_fn
from environments.rewards.base import RewardOutput
from environments.types import Message
from launch.recipes import calculator
from launch.recipes.demonstration import written_call
from launch.workload import Workload

PROGRAM, SOCKET = "CALCULATOR_PROGRAM", "CALCULATOR_SOCKET"
MINI = "mini"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {}"
ANTHROPIC_TOOLS = [
    {
        "name": each["function"]["name"],
        "description": each["function"]["description"],
        "input_schema": each["function"]["parameters"],
    }
    for each in own_rollout.SCHEMAS
]


async def solve_by_anthropic(task: dict[str, Any], client: PolicyClient) -> RewardOutput:
    """Anthropic's tool loop, as its manual has it."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        response = await client.anthropic.messages.create(
            model=client.model,
            system=calculator.AGENT_ARGS["system_prompt"],
            messages=messages,
            tools=ANTHROPIC_TOOLS,
            max_tokens=192,
        )
        if response.stop_reason != "tool_use":
            text = "".join(each.text for each in response.content if each.type == "text")
            return math_reward_fn(task_info=task, action=text)
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": run(each.name, each.input)}
            for each in response.content
            if each.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": response.content},
            {"role": "user", "content": results},
        ]


def run(name: str, arguments: Any) -> str:
    if name not in own_rollout.TOOLS:
        return f"Error: unknown tool {name!r}, known: {', '.join(own_rollout.TOOLS)}."
    return own_rollout.TOOLS[name](**arguments).to_string()


@dataclass(frozen=True)
class Program:
    """Sends a question to the program that answers at a socket; one that fails has not solved it."""

    name: str
    socket: str

    async def __call__(self, task: dict[str, Any], client: PolicyClient) -> RewardOutput:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        try:
            request = {"question": task["question"], "environment": client.environment}
            writer.write(f"{json.dumps(request)}\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        text = json.loads(answer) if answer else ""
        if self.name == MINI:  # it submits the number alone
            text = f"\\boxed{{{text.strip()}}}"
        return math_reward_fn(task_info=task, action=text)


def shell_conversation(task: dict[str, str], calculates: bool, guess: int) -> list[Message]:
    """The conversation of mini-swe-agent with a model that calculates in the shell, or submits a guess.

    Its tokens are those that the gateway has of it: ``test_outside_programs.py`` compares both.
    """
    expression = task["question"].removeprefix("What is ").removesuffix("?")
    messages: list[Message] = [
        {
            "role": "system",
            "content": "Solve it in a shell. You can call bash(command) inside <tool_call></tool_call>.",
        },
        {"role": "user", "content": task["question"]},
    ]
    if calculates:
        call = written_call("bash", command=f"echo $(({expression}))")
        messages += [
            {"role": "assistant", "content": call},
            {"role": "tool", "content": f"{task['ground_truth']}\n"},
        ]
    answer = task["ground_truth"] if calculates else guess
    return [
        *messages,
        {"role": "assistant", "content": written_call("bash", command=SUBMIT.format(answer))},
    ]


def shell_demonstrations(seed: int) -> list[list[Message]]:
    """As many as the recipe has, and as many of them with the right way."""
    rng = random.Random(seed)
    _, problems = calculator.split_problems()
    return [
        shell_conversation(
            rng.choice(problems),
            calculates=rng.random() < calculator.TOOL_SHARE,
            guess=rng.randint(-99, 999) if rng.random() < 0.5 else rng.randint(0, 9999),
        )
        for _ in range(calculator.NUM_DEMONSTRATIONS)
    ]


FUNCTIONS = {"openai": own_rollout.solve, "anthropic": solve_by_anthropic}


def workload(seed: int) -> Workload:
    name = os.environ[PROGRAM]
    rollout = FUNCTIONS.get(name) or Program(name, os.environ[SOCKET])
    whole = replace(own_rollout.workload(seed), rollout=rollout)
    return replace(whole, demonstrations=shell_demonstrations(seed)) if name == MINI else whole
