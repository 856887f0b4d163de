"""Play of one task to its end, and the data that it takes.

This module is imported in every rollout worker. It must stay light: no torch, no transformers, no Serve.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from actors.rollouts.env_calls import boundary, follow_up, in_agent, in_env, judge_episode, reset
from actors.rollouts.forks import Fork, ForkPoints
from actors.rollouts.journal import Journal
from environments.base import BaseEnv
from environments.contract import messages_faults
from environments.data.trajectory_json import plain_json
from environments.errors import AgentError, ContractError, EnvironmentFailure, PromptTooLongError
from environments.messages import same_types
from environments.types import (
    STATE_KEY,
    Action,
    Completion,
    Message,
    Step,
    StepEvent,
    TerminationReason,
    Trajectory,
)
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest, SamplingParams, Turn

Sample = Callable[[SampleRequest], Completion]
OnStep = Callable[[StepEvent], None]
"""Callback with each step of an episode as soon as that has ended; it does not wait."""
Exchanges = tuple[tuple[str, str], ...]
"""Messages of a client, each with the agent's answer to it."""
MAX_OBSERVATION = 20_000
"""Characters of an observation that a ``StepEvent`` holds at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLimits:
    """Limits at which a rollout ends, if not before. Tokens count over the whole trajectory."""

    max_steps: int = 5
    max_prompt_tokens: int | None = None
    """Longest first prompt."""
    max_response_tokens: int = 8192
    """Most tokens after the first prompt, sampled ones and those of the environment's answers."""
    max_turn_tokens: int | None = None
    """Most tokens of one completion."""
    budget_per_turn: bool = False
    """True lets both limits hold for each turn instead of the trajectory: for agents that rewrite history."""
    overlong_filter: bool = False
    """True masks a trajectory that a limit has ended: it is not trained on, and not judged at its end
    unless its environment was done. That is also one whose last answer ``max_response_tokens`` has cut (not
    where the limits hold for each turn), whatever its environment made of it."""
    timeout_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The agent and environment classes that a rollout actor puts together, and their arguments."""

    agent_class: type[BaseAgent]
    env_class: type[BaseEnv]
    agent_args: dict[str, Any] = field(default_factory=dict)
    env_args: dict[str, Any] = field(default_factory=dict)
    more_modules: tuple[str, ...] = ()
    """Modules that agent and environment load when they play."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that a process of several pairs imports once for all."""
        all_modules = (self.agent_class.__module__, self.env_class.__module__, *self.more_modules)
        return tuple(dict.fromkeys(filter(None, all_modules)))  # what exec has made is of none

    def make_agent(self) -> BaseAgent:
        """A new agent. Raises ``AgentError``."""
        name = self.agent_class.__name__
        with boundary(AgentError, "agent", name, "__init__"):
            return self.agent_class(**self.agent_args)

    def make_env(self, request: RolloutRequest) -> BaseEnv:
        """The environment of a task, in which the environment arguments stand over the task's own keys.

        Raises:
            EnvironmentFailure: ``from_dict`` raised.
            ContractError: it returned no environment.
        """
        name = self.env_class.__name__
        seed = {"seed": request.env_seed} if self.env_class.wants_seed else {}
        with boundary(EnvironmentFailure, "environment", name, "from_dict"):
            env = self.env_class.from_dict({**seed, **request.task, **self.env_args})
        if not isinstance(env, BaseEnv):
            raise ContractError(f"{name}.from_dict returned {env!r}: it has to return an environment.")
        if env.idx is None:  # else it has one of its own
            env.idx = request.index
        return env


class CountsTokens:
    """An environment that learns, while it is played, how many tokens a prompt has."""

    count_tokens: Callable[[list[Message], list[dict[str, Any]] | None], int]
    """Function that counts those of messages and tools. Raises ``PromptTooLongError``."""

    @property
    def goes_on(self) -> bool:
        """Return whether its first prompt has turns of an earlier rollout."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowUp:
    """A client's next message: the rollout ``after`` goes on with it, on the same agent and environment."""

    after: str | None
    """``None`` where this server has not had the conversation: a new pair replays the ``exchanges``."""
    message: str
    exchanges: Exchanges = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One rollout to be played: the same request always has the same task, seed and ids."""

    rollout_id: str
    group_id: str
    task: dict[str, Any]
    params: SamplingParams = SamplingParams()
    seed: int | None = None
    """Seed of the first turn; the next turns have the next ones. ``None`` leaves it to the server."""
    env_seed: int = 0
    """Seed for an environment that wants one and whose task has none: the same for all of a group."""
    min_version: int = 0
    """The oldest policy version that may sample for it."""
    index: int | None = None
    """Position of the task among those of its batch, for ``BaseEnv.idx``."""
    urgent: bool = False
    """True lets it go before the requests that are not: an evaluation does not wait for training."""
    follow_up: FollowUp | None = None
    """The message that it is instead of a new task."""
    keep_seconds: float | None = None
    """Seconds that its pair waits for a follow-up after its end. ``None`` closes its environment at once."""
    max_response_tokens: int | None = None
    """A lower limit than the one of ``RolloutLimits``."""
    fork: Fork | None = None
    """The turns that it shares with another rollout. ``None`` begins with the task."""
    forked_at: ForkPoints | None = None
    """The turns at which others fork from it; ``None`` for none."""

    @property
    def after(self) -> str | None:
        """The rollout that it goes on from, if this server has had that."""
        return self.follow_up.after if self.follow_up else None


def run_rollout(
    agent: BaseAgent,
    env: BaseEnv,
    sample: Sample,
    request: RolloutRequest,
    limits: RolloutLimits,
    journal: Journal,
    on_step: OnStep | None = None,
) -> Trajectory:
    """Play ``request.task`` to its end and return the agent's trajectory, rewards and completions filled in.

    A follow-up goes on where ``agent`` and ``env`` stand; its trajectory has its own steps only.

    Turns that ``journal`` has are not sampled again. The next ones have the seeds that they would have had.

    Raises:
        AgentError, EnvironmentFailure: the agent or the environment raised or broke its contract.
        SamplerError: the policy could not be sampled.
    """
    past = PastTurns()
    if isinstance(env, CountsTokens):
        env.count_tokens = partial(_num_prompt_tokens, request, sample, past)
    observation, info, earlier = _begin(agent, env, request, journal)
    last = earlier[-1].completion if earlier else None
    most = min(limits.max_response_tokens, request.max_response_tokens or limits.max_response_tokens)
    limits = replace(limits, max_response_tokens=most)
    budget = TokenBudget(limits, last, isinstance(env, CountsTokens) and env.goes_on)
    with in_agent(agent, "update_from_env"):
        agent.update_from_env(observation=observation, reward=0.0, done=False, info=budget.report(info))
    reason = TerminationReason.MAX_STEPS
    too_long: str | None = None
    for turn in range(limits.max_steps):
        if budget.spent:
            reason = TerminationReason.RESPONSE_BUDGET_SPENT
            break
        sample_request = _request(request, agent, turn, past, budget)
        try:
            completion = journal.completion(turn) or sample(sample_request)
        except PromptTooLongError as error:
            reason = TerminationReason.PROMPT_TOO_LONG
            too_long = str(error)
            break
        last = completion = completion.sharing(last)
        past.add(Turn(messages=sample_request.messages, completion=completion, tools=sample_request.tools))
        budget.count(completion)
        step, action = take_step(agent, completion, len(earlier) + turn, observation)
        begun_in = {STATE_KEY: info[STATE_KEY]} if STATE_KEY in info else {}
        with in_env(env, "step"):
            outcome = journal.step(turn, env, completion, action)
        observation, step.reward, step.done, info = outcome
        info = budget.report(info)
        with in_agent(agent, "update_from_env"):
            agent.update_from_env(observation=observation, reward=step.reward, done=step.done, info=info)
            step.info.update({key: value for key, value in info.items() if key != STATE_KEY} | begun_in)
        if on_step is not None:
            on_step(_step_event(turn, step, observation, completion))
        if step.done:
            is_cut = budget.spent and completion.finish_reason == "length"
            reason = TerminationReason.RESPONSE_BUDGET_SPENT if is_cut else TerminationReason.ENV_DONE
            break
    with in_agent(agent, "trajectory"):
        played = Trajectory(steps=agent.trajectory.steps[len(earlier) :]) if earlier else agent.trajectory
        trajectory = finish(played, request, reason)
    trajectory.masked = limits.overlong_filter and reason.is_overlong
    if not trajectory.steps:  # else it is the usual end of a long conversation
        trajectory.error = too_long
    judge_episode(env, trajectory)
    return trajectory


def _begin(
    agent: BaseAgent, env: BaseEnv, request: RolloutRequest, journal: Journal
) -> tuple[Any, dict[str, Any], list[Step]]:
    """The first observation and info, and the agent's steps of earlier messages."""
    if request.follow_up is not None:
        follow = partial(follow_up, message=request.follow_up.message)
        with in_env(env, "follow_up"):
            observation, info = journal.open(env, follow, "follow_up()")
        with in_agent(agent, "trajectory"):
            return observation, info, list(agent.trajectory.steps)
    with in_env(env, "reset"):
        observation, info = journal.open(env, reset)
    with in_agent(agent, "reset"):
        agent.reset()
    return observation, info, []


def _recorded(observation: Any) -> Any:
    """A copy, which the environment's later turns do not change; the text of an object that has no copy."""
    try:
        return copy.deepcopy(observation)
    except Exception:  # noqa: BLE001  # a handle of a browser, for example: only the agent has a use for it
        return str(observation)


def _step_event(turn: int, step: Step, observation: Any, completion: Completion) -> StepEvent:
    """The event of a step; ``observation`` is the one that followed it."""
    plain = observation if isinstance(observation, str) else json.dumps(plain_json(observation))
    return StepEvent(
        index=turn,
        text=step.model_response,
        observation=plain[:MAX_OBSERVATION],
        done=step.done,
        policy_version=completion.policy_version,
        num_tokens=completion.num_tokens,
    )


def take_step(agent: BaseAgent, completion: Completion, turn: int, observation: Any) -> tuple[Step, Any]:
    """Hand a completion to the agent; return the step that it appended and the action that it chose.

    ``observation`` is the one that the completion answers, for an agent that leaves it out of its step.
    """
    with in_agent(agent, "update_from_model"):
        extras: dict[str, Any] = {"tool_calls": list(completion.tool_calls)} if completion.tool_calls else {}
        if agent.wants_completion:
            extras["completion"] = completion
        action = agent.update_from_model(completion.text, **extras)
        steps = agent.trajectory.steps
    if not isinstance(action, Action):
        raise AgentError(
            f"{type(agent).__name__}.update_from_model returned {action!r}: write return Action(action=...), "
            "with environments.Action."
        )
    if len(steps) != turn + 1:
        raise AgentError(
            f"{type(agent).__name__}.update_from_model has left {len(steps)} steps in its trajectory after "
            f"turn {turn + 1}: it has to append exactly one Step to self.trajectory.steps per call."
        )
    step = steps[-1]
    if not isinstance(step, Step):
        raise AgentError(
            f"{type(agent).__name__}.update_from_model has appended {step!r} to its trajectory: append a "
            "Step(...), with environments.Step."
        )
    step.completion = completion
    step.model_response = step.model_response or completion.text
    if step.action is None:
        step.action = action.action
    if step.observation is None:
        step.observation = _recorded(observation)
    return step, action.action


class PastTurns:
    """Finds the turn that a conversation goes on from: mostly the last one, but a program with several
    conversations in one rollout comes back to each of them.
    """

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def add(self, turn: Turn) -> None:
        """Take note of a turn that was played."""
        self._turns.append(turn)

    def before(self, messages: list[Message]) -> tuple[Turn | None, list[Message]]:
        """The latest turn whose messages and answer ``messages`` begin with, else the last one.

        Beside it the same messages, as objects of that turn as far as it has them: so the history of all
        turns is in memory once. Others are copied, since many agents hand out a list that they go on with.
        """
        for turn in reversed(self._turns):
            count = len(turn.messages)
            goes_on = count < len(messages) and _holds(messages[count], turn.completion)
            is_same = goes_on and messages[:count] == turn.messages
            if is_same and same_types(turn.messages, messages):
                return turn, [*turn.messages, *copy.deepcopy(messages[count:])]
        return (self._turns[-1] if self._turns else None), copy.deepcopy(messages)


def _holds(message: Message, completion: Completion) -> bool:
    return message.get("role") == "assistant" and message.get("content") == completion.text


class TokenBudget:
    """Number of tokens that a trajectory may still sample.

    What was sampled counts, and whatever a prompt has more than the turn before: that is what the
    environment added. Nothing is given back where an agent or a template drops a part of the history.

    Args:
        last: completion of a conversation's message before, if any. Each message has the whole budget.
        goes_on: the first prompt has turns of an earlier rollout: what it is longer than a first one may be
            counts as theirs, so that both rollouts together are as long as one may be.
    """

    def __init__(self, limits: RolloutLimits, last: Completion | None = None, goes_on: bool = False) -> None:
        self._limits = limits
        self._history_tokens = last.num_tokens if last else 0
        self._used = 0
        self._last_turn = (limits.max_prompt_tokens or 0) if goes_on else 0
        """Prompt and completion of the turn that the next one goes on from; 0 before the first."""

    @property
    def spent(self) -> bool:
        return not self._limits.budget_per_turn and self._left < 1

    @property
    def max_tokens(self) -> int:
        return min(self._left, self._limits.max_turn_tokens or self._left)

    @property
    def max_prompt_tokens(self) -> int | None:
        """Limit of the next prompt as such: of the first one, and of each where turns have own budgets."""
        if self._grows or self._limits.max_prompt_tokens is None:
            return None
        return self._limits.max_prompt_tokens + self._history_tokens

    @property
    def max_total_tokens(self) -> int | None:
        """Limit of a later prompt with its completion: what the environment adds counts too."""
        return self._last_turn + self._left if self._grows else None

    @property
    def _left(self) -> int:
        return self._limits.max_response_tokens - (0 if self._limits.budget_per_turn else self._used)

    @property
    def _grows(self) -> bool:
        return self._last_turn > 0 and not self._limits.budget_per_turn

    def go_on_from(self, previous: Turn) -> None:
        """Take note of the turn that the next request goes on from, where that is not the last one."""
        self._last_turn = previous.completion.num_tokens

    def count(self, completion: Completion) -> None:
        """Take note of what was sampled, and of what its prompt has added."""
        prompt, sampled = completion.num_prompt_tokens, completion.num_completion_tokens
        added = max(0, prompt - self._last_turn) if self._last_turn else 0
        self._used += added + sampled
        self._last_turn = prompt + sampled

    def report(self, info: dict[str, Any]) -> dict[str, Any]:
        """The environment's info, with the limits that rLLM v0.1 adds for agents."""
        return {**info, "max_steps": self._limits.max_steps, "cur_tokens": self._used}


def finish(trajectory: Trajectory, request: RolloutRequest, reason: TerminationReason) -> Trajectory:
    """Fill in the task, the id, the reason and the reward of a trajectory that has ended."""
    trajectory.task = request.task
    trajectory.rollout_id = request.rollout_id
    trajectory.termination_reason = reason
    trajectory.reward = sum(step.reward for step in trajectory.steps)
    if request.fork is not None and request.fork.num_turns:
        trajectory.forked_from = request.fork.parent.rpartition("/")[2]
        trajectory.num_shared_turns = request.fork.num_turns
    return trajectory


def failed(
    request: RolloutRequest, reason: TerminationReason, error: str, steps: Sequence[Step] = ()
) -> Trajectory:
    """The trajectory of a rollout that failed, with the ``steps`` that it had played: data like any other."""
    trajectory = finish(Trajectory(steps=list(steps)), request, reason)
    trajectory.error = error
    return trajectory


def _request(
    request: RolloutRequest, agent: BaseAgent, turn: int, past: PastTurns, budget: TokenBudget
) -> SampleRequest:
    with in_agent(agent, "chat_completions"):
        shown = agent.chat_completions
        if faults := messages_faults(shown):
            raise AgentError(f"{type(agent).__name__}.{faults[0]}")
        previous, messages = past.before(shown)
        tools = agent.tool_schemas
    if previous is not None:
        budget.go_on_from(previous)
    seed = None if request.seed is None else request.seed + turn
    with in_agent(agent, "sampling"):
        own = {"max_tokens": budget.max_tokens, **agent.sampling}
        own["max_tokens"] = min(own["max_tokens"], budget.max_tokens)
        params = replace(request.params, seed=seed, **own)
    return SampleRequest(
        messages=messages,
        params=params,
        session_id=request.rollout_id,
        previous=previous,
        min_version=request.min_version,
        tools=tools,
        tool_parser=agent.served_parser,
        max_prompt_tokens=budget.max_prompt_tokens,
        max_total_tokens=budget.max_total_tokens,
    )


def _num_prompt_tokens(
    request: RolloutRequest,
    sample: Sample,
    past: PastTurns,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
) -> int:
    """Count the tokens of a prompt as the sampler makes it: a token is sampled behind them, and dropped."""
    previous, messages = past.before(messages)
    params = replace(request.params, max_tokens=1, seed=request.seed)
    return sample(
        SampleRequest(
            messages=messages,
            params=params,
            session_id=request.rollout_id,
            previous=previous,
            min_version=request.min_version,
            tools=tools,
        )
    ).num_prompt_tokens
