"""The protocol of reward functions, and their output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from environments.errors import EnvironmentFailure


@dataclass(frozen=True)
class RewardOutput:
    """The verdict on one answer. ``metadata`` gives the reasons."""

    reward: float
    metadata: dict[str, Any] = field(default_factory=dict)
    is_correct: bool | None = None


class RewardFunction(Protocol):
    """Judges an answer. It is called with keywords, so the parameters have to have these names."""

    def __call__(self, task_info: dict[str, Any], action: str) -> RewardOutput | float: ...


def judge(reward_fn: RewardFunction, task: dict[str, Any], action: Any) -> RewardOutput:
    """Call ``reward_fn`` and check its verdict; a plain number becomes a RewardOutput.

    Raises:
        EnvironmentFailure: it returned neither a number nor a RewardOutput, or the reward is not finite.
    """
    verdict = reward_fn(task_info=task, action=action)
    output = RewardOutput(float(verdict)) if isinstance(verdict, Real) else verdict
    if not isinstance(output, RewardOutput):
        raise EnvironmentFailure(
            f"The reward function {reward_fn} returned {verdict!r}: return a RewardOutput."
        )
    if not math.isfinite(output.reward):
        raise EnvironmentFailure(
            f"The reward function {reward_fn} returned {output.reward}: it must be finite."
        )
    return output
