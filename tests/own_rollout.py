"""A workload of a user's own: the calculator, solved by a program that calls a model as any other would."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from actors.gateway.client import PolicyClient
from environments import math_reward_fn
from environments.rewards.base import RewardOutput
from environments.tools import make_tools
from environments.tools.base import openai_schema
from launch.recipes import calculator
from launch.workload import Workload

TOOLS = make_tools(["calculator"], None)
SCHEMAS = [openai_schema(tool.json) for tool in TOOLS.values()]


async def solve(task: dict[str, Any], client: PolicyClient) -> RewardOutput:
    """OpenAI's tool loop, as its manual has it."""
    messages: list[Any] = [
        {"role": "system", "content": calculator.AGENT_ARGS["system_prompt"]},
        {"role": "user", "content": task["question"]},
    ]
    while True:
        response = await client.openai.chat.completions.create(
            model=client.model, messages=messages, tools=SCHEMAS, temperature=0.7
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return math_reward_fn(task_info=task, action=message.content)
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function)})


def run(function: Any) -> str:
    """The output of a tool that the model has called."""
    if function.name not in TOOLS:
        return f"Error: unknown tool {function.name!r}, known: {', '.join(TOOLS)}."
    return TOOLS[function.name](**json.loads(function.arguments)).to_string()


def workload(seed: int) -> Workload:
    return replace(
        calculator.workload(seed),
        agent_class=None,
        env_class=None,
        rollout=solve,
        agent_args={"parser_name": "hermes-brief"},
        env_args={},
    )
