"""The calculator for a pretrained model: SmolLM2-135M learns to call it, from two worked examples and reward.

The problems are those of the recipe ``calculator``. The model knows how to chat, and the examples show how a
call and an answer are written; there are no demonstrations to learn from. After one example alone the
model calls in one of ten answers, and then wrongly; after two, one of four answers is a correct call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from environments import RewardOutput, ToolEnvironment
from environments.rewards.reading import last_boxed
from environments.types import Message
from launch.recipes import calculator
from launch.recipes.demonstration import written_call
from launch.workload import Workload


def worked_example(question: str, expression: str, answer: str) -> list[Message]:
    """A problem that is solved by the calculator, as the messages of its conversation."""
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": written_call("calculator", expression=expression)},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
    ]


def agent_args(examples: list[Message]) -> dict[str, Any]:
    """Arguments of a ``ToolAgent`` with the calculator, which is shown ``examples`` before each task."""
    return {**calculator.AGENT_ARGS, "system_prompt": "Use the calculator.", "examples": examples}


def number_reward_fn(task_info: dict[str, Any], action: str) -> RewardOutput:
    r"""Reward 1 if the last ``\boxed{...}`` holds the number itself: ``\boxed{53+87}`` is not calculated."""
    answer = last_boxed(action)
    correct = answer is not None and answer.strip() == task_info["ground_truth"]
    return RewardOutput(float(correct), {"answer": answer}, is_correct=correct)


ENV_ARGS: dict[str, Any] = {"tools": ["calculator"], "reward_fn": number_reward_fn}


EXAMPLES = [
    *worked_example("What is 41*31?", "41*31", "1271"),
    *worked_example("What is 27+85?", "27+85", "112"),
]


def workload(seed: int) -> Workload:
    """The problems of ``calculator``; the held-out ones are the same for every seed."""
    return replace(
        calculator.workload(seed),
        env_class=ToolEnvironment,
        agent_args=agent_args(EXAMPLES),
        env_args=ENV_ARGS,
        demonstrations=(),
    )
