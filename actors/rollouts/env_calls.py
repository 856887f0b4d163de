"""The calls of the user's classes in a rollout: what they raise names its place, what they return is checked.

This module is imported in every rollout worker. It must stay light: no torch, no transformers, no Serve.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from environments import contract
from environments.base import BaseEnv, judged_success
from environments.errors import AgentError, ConfigError, ContractError, EnvironmentFailure, TroupeError
from environments.rewards.base import LATER
from environments.types import TerminationReason, Trajectory
from policies.agents.base import BaseAgent

Opening = tuple[Any, dict[str, Any]]
Outcome = tuple[Any, float, bool, dict[str, Any]]
ENV_ANSWER = ("observation", "reward", "done", "info")
AGENT_CALLS = (
    ("reset", "(self)", (), ()),
    ("update_from_env", "(self, observation, reward, done, info, **kwargs)", (), ENV_ANSWER),
    ("update_from_model", "(self, response, **kwargs)", ("",), ()),
)
ENV_CALLS = (
    ("reset", "(self)", (), ()),
    ("step", "(self, action)", ("",), ()),
    ("close", "(self)", (), ()),
)
"""Methods that a class may define, their head, and the arguments that they get by position and by name."""


def check_class(name: str, given: Any, base: type[BaseAgent] | type[BaseEnv]) -> None:
    """Require that the argument ``name`` is a class that rollouts can make and call.

    Raises ``ConfigError``.
    """
    if isinstance(given, base):
        kind = type(given).__name__
        raise ConfigError(f"{name} is an instance, and every rollout makes its own: write {name}={kind}.")
    shown = given.__name__ if isinstance(given, type) else repr(given)
    if not (isinstance(given, type) and issubclass(given, base)):
        raise ConfigError(f"{name}={shown} has to be a class that is derived from {base.__name__}.")
    if inspect.isabstract(given):
        missing = ", ".join(sorted(vars(given)["__abstractmethods__"]))
        raise ConfigError(f"{name}={shown} lacks methods of {base.__name__}: define {missing}.")
    for method, head, positional, named in AGENT_CALLS if base is BaseAgent else ENV_CALLS:
        function = inspect.getattr_static(given, method)
        if inspect.isfunction(function):
            _check_call(f"{shown}.{method}", function, f"def {method}{head}", (None, *positional), named)
    if issubclass(given, BaseEnv):
        _check_call(f"{shown}.from_dict", given.from_dict, "@staticmethod and def from_dict(info)", ({},), ())


def _check_call(
    name: str, function: Callable[..., Any], right: str, positional: Sequence[Any], named: Sequence[str]
) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name}() {contract.IS_ASYNC}")
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(named))
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called as rollouts call it ({error}): write {right}.") from error


def check_agent_args(agent_class: type[BaseAgent], agent_args: Mapping[str, Any]) -> None:
    """Require that the agent can be made from its arguments. Raises ``ConfigError``."""
    try:
        inspect.signature(agent_class).bind(**agent_args)
    except TypeError as error:
        raise ConfigError(
            f"agent_args={sorted(agent_args)} are not the arguments of {agent_class.__name__} ({error}): "
            f"name those of {agent_class.__name__}.__init__."
        ) from error


@contextmanager
def boundary(error_type: type[TroupeError], kind: str, owner: str, method: str) -> Iterator[None]:
    """Attribute whatever escapes the block to the user's class and method that it came from."""
    try:
        yield
    except TroupeError:
        raise
    except (Exception, SystemExit) as error:
        raise error_type(f"The {kind} raised in {owner}.{method}: {type(error).__name__}: {error}") from error


def in_agent(agent: BaseAgent, method: str) -> AbstractContextManager[None]:
    """A ``boundary`` around a method of the agent."""
    return boundary(AgentError, "agent", type(agent).__name__, method)


def in_env(env: BaseEnv, method: str) -> AbstractContextManager[None]:
    """A ``boundary`` around a method of the environment."""
    return boundary(EnvironmentFailure, "environment", type(env).__name__, method)


def reset(env: BaseEnv) -> Opening:
    """First observation and info. Raises ``ContractError`` for anything else than these two."""
    return _opening(env, env.reset(), "reset()")


def follow_up(env: BaseEnv, message: str) -> Opening:
    """Observation and info of a client's next message. Raises ``ContractError`` for anything else."""
    return _opening(env, env.follow_up(message), "follow_up()")


def _opening(env: BaseEnv, result: Any, method: str) -> Opening:
    _check_values(env, contract.reset_faults(result, method))
    observation, info = result
    return observation, info


def take_action(env: BaseEnv, action: Any) -> Outcome:
    """Observation, reward, done and info. Raises ``ContractError`` for anything else than these four."""
    result = env.step(action)
    _check_values(env, contract.step_faults(result))
    observation, reward, done, info = result
    return observation, float(reward), bool(done), info


def judge_episode(env: BaseEnv, trajectory: Trajectory) -> None:
    """Fill in the verdict on an episode that is over, in the place of its last reward, and its metrics."""
    steps = trajectory.steps
    if steps and (steps[-1].done or not trajectory.masked):
        with in_env(env, "compute_final_reward"):
            final = env.compute_final_reward()
            _check_values(env, contract.final_reward_faults(final))
            if final is not None:
                steps[-1].reward = float(final)
                trajectory.reward = sum(step.reward for step in steps)
    if steps:
        with in_env(env, "is_correct"):
            is_correct, trajectory.by_reward_function = judged_success(env)
            _check_values(env, contract.is_correct_faults(is_correct))
            trajectory.is_correct = None if is_correct is None else bool(is_correct)
        if env._reward_output == LATER:  # or a copy, of a function that was sent by value
            trajectory.termination_reason = TerminationReason.JUDGED_LATER
    with in_env(env, "compute_metrics"):
        metrics = env.compute_metrics()
        _check_values(env, contract.metrics_faults(metrics))
        trajectory.metrics = {name: float(value) for name, value in metrics.items()}


def _check_values(env: BaseEnv, faults: list[str]) -> None:
    if faults:
        raise ContractError(f"{type(env).__name__}.{' '.join(faults)}")
