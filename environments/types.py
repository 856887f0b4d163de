"""The data that flows through Troupe, from a task to a group of finished trajectories.

``Action``, ``Step`` and ``Trajectory`` keep the names and call shapes of rLLM v0.1, so agents written
against it run unchanged; they are mutable because agents fill them in as they play. The
products of the engine (``Completion``, ``TrajectoryGroup``) are frozen: sampled tokens must not be edited.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""A chat message in the OpenAI shape: ``{"role": ..., "content": ...}``."""


class TerminationReason(StrEnum):
    """Reason for which a trajectory ended. Every trajectory that the engine returns carries one."""

    ENV_DONE = "env_done"
    """The environment returned ``done``, for an answer that no limit of the trajectory had cut."""
    MAX_STEPS = "max_steps"
    """The step limit was reached before the environment was done."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The next prompt would not fit into the prompt budget or the model's context."""
    RESPONSE_BUDGET_SPENT = "response_budget_spent"
    """All tokens that the trajectory may hold after its first prompt are used up. The environment may have
    been done with the answer that this limit has cut: its reward stays."""
    TIMEOUT = "timeout"
    """The trajectory ran longer than its time limit; its actor was ended."""
    AGENT_ERROR = "agent_error"
    """The agent raised or broke its contract; ``Trajectory.error`` says how, as for all that follow."""
    ENV_ERROR = "env_error"
    """The environment raised or broke its contract."""
    OUT_OF_MEMORY = "out_of_memory"
    """The environment wanted more memory than its limit; its actor was ended."""
    CRASHED = "crashed"
    """The process of the pair ended: it exited, was killed, or its node was lost."""
    SAMPLER_ERROR = "sampler_error"
    """The policy could not be sampled: the server was unreachable or rejected the request."""

    @property
    def is_failure(self) -> bool:
        """Return whether the agent, the environment or the machinery below them failed."""
        return self is TerminationReason.AGENT_ERROR or self.is_infrastructure

    @property
    def is_infrastructure(self) -> bool:
        """Return whether something other than the agent failed."""
        return self in _INFRASTRUCTURE

    @property
    def is_overlong(self) -> bool:
        """Return whether a limit ended the trajectory, or cut its last answer."""
        return self in _OVERLONG


_INFRASTRUCTURE = {
    TerminationReason.ENV_ERROR,
    TerminationReason.OUT_OF_MEMORY,
    TerminationReason.CRASHED,
    TerminationReason.SAMPLER_ERROR,
}
_OVERLONG = {
    TerminationReason.MAX_STEPS,
    TerminationReason.PROMPT_TOO_LONG,
    TerminationReason.RESPONSE_BUDGET_SPENT,
    TerminationReason.TIMEOUT,
}


class JudgedBy(StrEnum):
    """The judge of a trajectory's success: the first of these that says anything."""

    REWARD_FUNCTION = "reward function"
    """``RewardOutput.is_correct``."""
    ENVIRONMENT = "environment"
    """``BaseEnv.is_correct``."""
    REWARD = "reward above 0"
    """Nobody has said whether it is correct: its reward decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A sampled answer to a prompt. Its token ids are the engine's, never recomputed from the text.

    ``prompt_ids`` [P] and ``completion_ids`` [C] are the model's input and output; ``logprobs`` [C] are
    natural logs under the distribution that was sampled from (after temperature). ``completion_ids``
    includes the end-of-sequence token where one was sampled, ``text`` does not.
    """

    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str
    finish_reason: str
    policy_version: int = 0
    """The oldest version that sampled any of its tokens."""
    token_versions: tuple[int, ...] = ()
    """[C] The version that sampled each token; empty where the server does not say."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Tool calls that the server parsed from the output, in the OpenAI shape. ``text`` is without them,
    unless the request named the parser."""
    retokenized: bool = False
    """The ids are not the engine's: an outside server did not return them, so they were made from the text,
    or are empty. Such a completion can be scored but not trained on."""
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens as the server counted them, where it did not return their ids."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens, whether its ids are known or not."""
        return self.usage[0] if self.usage else len(self.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens that were sampled, whether their ids are known or not."""
        return self.usage[1] if self.usage else len(self.completion_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer together."""
        return self.num_prompt_tokens + self.num_completion_tokens


@dataclass
class Action:
    """An agent's decision; ``BaseEnv.step`` gets its ``action``, without this wrapper."""

    action: Any = None


@dataclass
class Step:
    """A turn. The agent fills the first group of fields, the engine the second."""

    chat_completions: list[Message] = field(default_factory=list)
    thought: str = ""
    action: Any = None
    observation: Any = None
    model_response: str = ""

    info: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    done: bool = False
    mc_return: float = 0.0
    """Discounted sum of this and all later rewards of the trajectory."""
    completion: Completion | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """A step of an episode that goes on: what was sampled, and what the environment answered."""

    index: int
    text: str
    observation: str
    done: bool = False
    policy_version: int = 0
    num_tokens: int = 0
    """Tokens of the prompt and of the answer in this step."""


@dataclass
class Trajectory:
    """An agent's attempt at one task. ``reward`` is the sum of the step rewards."""

    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float = 0.0
    is_correct: bool | None = None
    """The verdict of the reward function, or else of the environment; ``None`` where neither gives one."""
    by_reward_function: bool = False
    """True where ``is_correct`` is the reward function's."""

    rollout_id: str = ""
    """``<group>/<member>``: unique within a run, the same when a run is resumed."""
    termination_reason: TerminationReason | None = None
    error: str | None = None
    """The failure, with the traceback of the user's code. Also set where only ``close`` has failed, and
    where the first prompt is too long already."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of ``BaseEnv.compute_metrics``."""
    masked: bool = False
    """Excluded from training: a limit has ended it, and ``overlong_filter`` is set."""
    seconds: float = 0.0
    """Wall time of the rollout."""

    def to_dict(self) -> dict[str, Any]:
        """A copy as dicts and lists; unlike that of rLLM v0.1, with the task."""
        return asdict(self)

    @property
    def failed(self) -> bool:
        """Return whether the agent, the environment or the machinery below them failed: ``error`` says
        how."""
        return self.termination_reason is not None and self.termination_reason.is_failure

    @property
    def succeeded(self) -> bool:
        """Return whether it counts as correct: it did not fail, and so its judge says; see ``judged_by``."""
        is_correct = self.reward > 0 if self.is_correct is None else self.is_correct
        return is_correct and not self.failed

    @property
    def judged_by(self) -> JudgedBy:
        """The judge who decides whether it counts as correct."""
        if self.is_correct is None:
            return JudgedBy.REWARD
        return JudgedBy.REWARD_FUNCTION if self.by_reward_function else JudgedBy.ENVIRONMENT

    @property
    def has_answer(self) -> bool:
        """Return whether it has ended in an answer, good or bad, to which a client may reply."""
        reason = self.termination_reason
        has_ended_well = reason is not None and not reason.is_failure
        return bool(self.steps) and has_ended_well and reason is not TerminationReason.TIMEOUT

    @property
    def completions(self) -> list[Completion]:
        """The completions, turn by turn; a turn that the agent's own code decided has none."""
        return [step.completion for step in self.steps if step.completion is not None]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that were sampled in all turns."""
        return sum(completion.num_completion_tokens for completion in self.completions)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of its budget that it has used: all sampled tokens, and those that a later prompt has more
        than the turn before it. An agent that rewrites its history gets nothing back.
        """
        used = last_turn = 0
        for completion in self.completions:
            observed = max(0, completion.num_prompt_tokens - last_turn) if last_turn else 0
            used += observed + completion.num_completion_tokens
            last_turn = completion.num_tokens
        return used


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """All trajectories of one task that are compared with each other, in member order."""

    group_id: str
    task: Any
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """A greedy rollout of the same task, for ReMax; never trained on."""

    @property
    def rollouts(self) -> tuple[Trajectory, ...]:
        """Everything that was rolled out for the group, the baseline included."""
        return self.trajectories if self.baseline is None else (*self.trajectories, self.baseline)
