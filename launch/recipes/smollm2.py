"""The calculator for a pretrained model: SmolLM2-135M learns to call it, from one worked example and reward.

The problems are those of the recipe ``calculator``. The model knows how to chat, and the example shows once
how a call and an answer are written; there are no demonstrations to learn from.
"""

from __future__ import annotations

import json
from typing import Any

from environments import Dataset, ToolEnvironment, math_reward_fn
from environments.types import Message
from launch.recipes.calculator import split_problems
from launch.workload import Workload
from policies import ToolAgent


def worked_example(question: str, expression: str, answer: str) -> list[Message]:
    """A problem that is solved by the calculator, as the messages of its conversation."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
    ]


def agent_args(example: list[Message]) -> dict[str, Any]:
    """Arguments of a ``ToolAgent`` with the calculator, which is shown ``example`` before each task."""
    return {
        "system_prompt": "Use the calculator.",
        "parser_name": "hermes-brief",
        "tools": ["calculator"],
        "examples": example,
    }


ENV_ARGS: dict[str, Any] = {"tools": ["calculator"], "reward_fn": math_reward_fn}


def workload(seed: int) -> Workload:
    """All problems with two-digit operands; the held-out ones are the same for every seed."""
    held_out, rest = split_problems()
    return Workload(
        agent_class=ToolAgent,
        env_class=ToolEnvironment,
        train_dataset=Dataset(rest, name="calculator", split="train").shuffle(seed),
        val_dataset=Dataset(held_out, name="calculator", split="test"),
        agent_args=agent_args(worked_example("What is 7+5?", "7+5", "12")),
        env_args=ENV_ARGS,
    )
