"""The calls of an environment in a rollout, with what they return checked against the contract.

This module is imported in every rollout worker. It must stay light: no torch, no transformers, no Serve.
"""

from __future__ import annotations

from typing import Any

from actors.rollouts.journal import Opening, Outcome
from environments.base import BaseEnv, judged_success
from environments.contract import (
    final_reward_faults,
    is_correct_faults,
    metrics_faults,
    reset_faults,
    step_faults,
)
from environments.errors import ContractError
from environments.types import Trajectory


def reset(env: BaseEnv) -> Opening:
    """First observation and info. Raises ``ContractError`` for anything else than these two."""
    return _opening(env, env.reset(), "reset()")


def follow_up(env: BaseEnv, message: str) -> Opening:
    """Observation and info of a client's next message. Raises ``ContractError`` for anything else."""
    return _opening(env, env.follow_up(message), "follow_up()")


def _opening(env: BaseEnv, result: Any, method: str) -> Opening:
    _check_values(env, reset_faults(result, method))
    observation, info = result
    return observation, info


def take_action(env: BaseEnv, action: Any) -> Outcome:
    """Observation, reward, done and info. Raises ``ContractError`` for anything else than these four."""
    result = env.step(action)
    _check_values(env, step_faults(result))
    observation, reward, done, info = result
    return observation, float(reward), bool(done), info


def judge_episode(env: BaseEnv, trajectory: Trajectory) -> None:
    """Put the environment's verdict on the whole episode, if it has one, in the place of the last reward."""
    final = env.compute_final_reward()
    _check_values(env, final_reward_faults(final))
    if final is not None:
        trajectory.steps[-1].reward = float(final)
        trajectory.reward = sum(step.reward for step in trajectory.steps)


def note_success(env: BaseEnv, trajectory: Trajectory) -> None:
    """Record the success of the episode, where its reward function or the environment gives a verdict."""
    is_correct, by_reward_function = judged_success(env)
    _check_values(env, is_correct_faults(is_correct))
    trajectory.is_correct = None if is_correct is None else bool(is_correct)
    trajectory.by_reward_function = by_reward_function


def episode_metrics(env: BaseEnv) -> dict[str, float]:
    """The environment's numbers of the episode, as floats. Raises ``ContractError`` for others."""
    metrics = env.compute_metrics()
    _check_values(env, metrics_faults(metrics))
    return {name: float(value) for name, value in metrics.items()}


def _check_values(env: BaseEnv, faults: list[str]) -> None:
    if faults:
        raise ContractError(f"{type(env).__name__}.{' '.join(faults)}")
