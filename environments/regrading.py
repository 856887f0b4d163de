"""Rewards of finished trajectories, given anew by another reward function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from environments.rewards.base import RewardFunction, RewardOutput, judge
from environments.tool_environment import answer_of
from environments.types import Step, TerminationReason, Trajectory


def regraded(trajectory: Trajectory, reward_fn: RewardFunction) -> Trajectory:
    """A copy of ``trajectory`` with the rewards that ``reward_fn`` gives it.

    It judges what Troupe's environments have judged: every step that is an answer, which is a text or a
    ``finish`` call. A step of tool calls keeps its reward. A trajectory that failed or ran out of time was
    judged by nobody, and stays as it is. The steps' ``mc_return`` and ``info`` are of the former rewards.

    Raises:
        EnvironmentFailure: ``reward_fn`` returned no verdict.
    """
    if trajectory.failed or trajectory.termination_reason is TerminationReason.TIMEOUT:
        return trajectory
    verdicts = [_verdict(reward_fn, trajectory.task, step) for step in trajectory.steps]
    pairs = zip(trajectory.steps, verdicts, strict=True)
    steps = [step if verdict is None else replace(step, reward=verdict.reward) for step, verdict in pairs]
    last = next((verdict for verdict in reversed(verdicts) if verdict is not None), None)
    if last is None:
        return trajectory
    return replace(
        trajectory,
        steps=steps,
        reward=sum(step.reward for step in steps),
        is_correct=last.is_correct,
        by_reward_function=last.is_correct is not None,
    )


def _verdict(reward_fn: RewardFunction, task: Any, step: Step) -> RewardOutput | None:
    """The verdict on a step; ``None`` if it is no answer. An agent without actions answers by its text."""
    is_action = isinstance(step.action, str | list | dict)
    answer = answer_of(step.action if is_action else step.model_response)
    return None if answer is None else judge(reward_fn, task, answer)
