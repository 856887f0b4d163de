"""Playing one task to its end, and the Ray actor that does so: one agent, one environment, one process.

This module is imported in every rollout worker. It must stay light: no torch, no transformers, no Serve.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from environments.base import BaseEnv
from environments.errors import AgentError, EnvironmentFailure, PromptTooLongError, SamplerError, TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest, SamplingParams, Turn

Sample = Callable[[SampleRequest], Completion]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLimits:
    """Where a rollout ends if its environment does not end it. Tokens count over the whole trajectory."""

    max_steps: int = 5
    max_prompt_tokens: int | None = None
    """Longest first prompt."""
    max_response_tokens: int = 8192
    """Everything after the first prompt: what was sampled and what the environment answered."""
    max_turn_tokens: int | None = None
    """Most tokens of one completion."""
    timeout_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The agent and environment classes that a rollout actor puts together, and their arguments."""

    agent_class: type[BaseAgent]
    env_class: type[BaseEnv]
    agent_args: dict[str, Any] = field(default_factory=dict)
    env_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOrder:
    """One rollout to be played: the same order always names the same task, seed and ids."""

    rollout_id: str
    group_id: str
    task: dict[str, Any]
    params: SamplingParams = SamplingParams()
    seed: int = 0
    min_version: int = 0
    """The oldest policy version that may sample for it."""


def run_rollout(
    agent: BaseAgent, env: BaseEnv, sample: Sample, order: RolloutOrder, limits: RolloutLimits
) -> Trajectory:
    """Play ``order.task`` to its end and return the agent's trajectory, rewards and completions filled in.

    Raises:
        AgentError, EnvironmentFailure: the agent or the environment raised or broke its contract.
        SamplerError: the policy could not be sampled.
    """
    with boundary(EnvironmentFailure, "environment", type(env).__name__, "reset"):
        observation, info = env.reset()
    with boundary(AgentError, "agent", type(agent).__name__, "reset"):
        agent.reset()
    with boundary(AgentError, "agent", type(agent).__name__, "update_from_env"):
        agent.update_from_env(observation, 0.0, False, info)
    reason = TerminationReason.MAX_STEPS
    previous: Turn | None = None
    budget = TokenBudget(limits)
    for turn in range(limits.max_steps):
        if budget.spent:
            reason = TerminationReason.RESPONSE_BUDGET_SPENT
            break
        messages = copy.deepcopy(agent.chat_completions)  # many agents hand out a list that they go on with
        try:
            completion = sample(_request(order, messages, turn, previous, budget))
        except PromptTooLongError:
            reason = TerminationReason.PROMPT_TOO_LONG
            break
        previous = Turn(messages=messages, completion=completion)
        budget.count(completion)
        step, action = take_step(agent, completion, turn)
        with boundary(EnvironmentFailure, "environment", type(env).__name__, "step"):
            observation, reward, done, info = env.step(action)
        with boundary(AgentError, "agent", type(agent).__name__, "update_from_env"):
            agent.update_from_env(observation, reward, done, info)
        step.reward, step.done, step.completion = float(reward), bool(done), completion
        step.info.update(info)
        if done:
            reason = TerminationReason.ENV_DONE
            break
    return finish(agent.trajectory, order, reason)


def take_step(agent: BaseAgent, completion: Completion, turn: int) -> tuple[Step, Any]:
    """Hand a completion to the agent; return the step that it appended and the action that it chose."""
    with boundary(AgentError, "agent", type(agent).__name__, "update_from_model"):
        action = agent.update_from_model(completion.text)
    num_steps = len(agent.trajectory.steps)
    if num_steps != turn + 1:
        raise AgentError(
            f"{type(agent).__name__}.update_from_model has left {num_steps} steps in its trajectory after "
            f"turn {turn + 1}: it has to append exactly one Step to self.trajectory.steps per call."
        )
    step = agent.trajectory.steps[-1]
    step.model_response = step.model_response or completion.text
    if step.action is None:
        step.action = action.action
    return step, action.action


class TokenBudget:
    """How many tokens a trajectory may still sample."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._first_prompt = 0
        self._used = 0

    @property
    def spent(self) -> bool:
        return self._used >= self._limits.max_response_tokens

    @property
    def max_tokens(self) -> int:
        left = self._limits.max_response_tokens - self._used
        return min(left, self._limits.max_turn_tokens or left)

    @property
    def max_prompt_tokens(self) -> int | None:
        """Limit of the next prompt: of the first, what is configured; later ones grow within the budget."""
        if self._first_prompt:
            return self._first_prompt + self._limits.max_response_tokens
        return self._limits.max_prompt_tokens

    def count(self, completion: Completion) -> None:
        self._first_prompt = self._first_prompt or len(completion.prompt_ids)
        self._used = len(completion.prompt_ids) + len(completion.completion_ids) - self._first_prompt


def finish(trajectory: Trajectory, order: RolloutOrder, reason: TerminationReason) -> Trajectory:
    """Fill in what the engine knows about a trajectory that has ended."""
    trajectory.task = order.task
    trajectory.rollout_id = order.rollout_id
    trajectory.termination_reason = reason
    trajectory.reward = sum(step.reward for step in trajectory.steps)
    return trajectory


def failed(order: RolloutOrder, reason: TerminationReason, error: str) -> Trajectory:
    """The trajectory of a rollout that failed: data like any other, so that nothing goes missing."""
    trajectory = finish(Trajectory(), order, reason)
    trajectory.error = error
    return trajectory


@contextmanager
def boundary(error_type: type[TroupeError], kind: str, owner: str, method: str) -> Iterator[None]:
    """Attribute whatever escapes the block to the user's class and method that it came from."""
    try:
        yield
    except TroupeError:
        raise
    except Exception as error:
        raise error_type(f"The {kind} raised in {owner}.{method}: {type(error).__name__}: {error}") from error


def _request(
    order: RolloutOrder,
    messages: list[dict[str, Any]],
    turn: int,
    previous: Turn | None,
    budget: TokenBudget,
) -> SampleRequest:
    params = replace(order.params, max_tokens=budget.max_tokens, seed=order.seed + turn)
    return SampleRequest(
        messages=messages,
        params=params,
        session_id=order.rollout_id,
        previous=previous,
        min_version=order.min_version,
        max_prompt_tokens=budget.max_prompt_tokens,
    )


@ray.remote(num_cpus=0)
class RolloutActor:
    """One agent and one environment in a process of their own, reused from task to task."""

    def __init__(self, pair: Pair, sampler: ray.actor.ActorHandle, limits: RolloutLimits) -> None:
        self._pair = pair
        self._limits = limits
        self._agent = pair.agent_class(**pair.agent_args)
        self._sampler = sampler

    def ready(self) -> bool:
        """True, once the process is up and the agent is made."""
        return True

    def run(self, order: RolloutOrder) -> Trajectory:
        """Play ``order``. What agent, environment or sampler raise is returned in the trajectory."""
        start = time.monotonic()
        try:
            trajectory = self._play(order)
        except TroupeError as error:
            trajectory = failed(order, TerminationReason.ERROR, _report(error))
        trajectory.seconds = time.monotonic() - start
        return trajectory

    def _play(self, order: RolloutOrder) -> Trajectory:
        env_class = self._pair.env_class
        with boundary(EnvironmentFailure, "environment", env_class.__name__, "from_dict"):
            env = env_class.from_dict({"seed": order.seed, **order.task, **self._pair.env_args})
        try:
            return run_rollout(self._agent, env, self._sample, order, self._limits)
        finally:
            with boundary(EnvironmentFailure, "environment", env_class.__name__, "close"):
                env.close()

    def _sample(self, request: SampleRequest) -> Completion:
        try:
            return ray.get(self._sampler.sample.remote(request))
        except RayTaskError as error:  # Ray's wrapper around what the sampler raised
            raise error.cause from None
        except RayActorError as error:  # not ours, so a new rollout actor would not help
            raise SamplerError(f"The sampler's process has ended: {error}") from error


def _report(error: TroupeError) -> str:
    """The error's sentence, and below it the traceback of the user's code that caused it."""
    cause = error.__cause__
    details = "".join(traceback.format_exception(cause)) if cause is not None else ""
    return f"{type(error).__name__}: {error}\n{details}".rstrip()
