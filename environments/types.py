"""The data that flows through Troupe, from a task to a group of finished trajectories.

``Action``, ``Step`` and ``Trajectory`` keep the names and call shapes of rLLM v0.1, so agents written
against it run unchanged; they are mutable because agents fill them in as they play. The
products of the engine (``Completion``, ``TrajectoryGroup``) are frozen: sampled tokens must not be edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from environments.messages import Message as Message
from environments.steps import Completion, Step, share
from environments.turns import Turn, Turns


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
    JUDGED_LATER = "judged_later"
    """The function or program has ended, and its reward will come later: this run does not learn from it."""
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
    UNJUDGED = "unjudged"
    """The rollout came to its end, and its group could not be compared."""

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
    TerminationReason.UNJUDGED,
}
_OVERLONG = {
    TerminationReason.MAX_STEPS,
    TerminationReason.PROMPT_TOO_LONG,
    TerminationReason.RESPONSE_BUDGET_SPENT,
    TerminationReason.TIMEOUT,
}


STATE_KEY = "state_key"
"""Key of an environment's info that names the state which the observation shows: equal values for equal
states. The step that answers the observation keeps it in its own info."""


class JudgedBy(StrEnum):
    """The judge of a trajectory's success: the first of these that says anything."""

    REWARD_FUNCTION = "reward function"
    """``RewardOutput.is_correct``."""
    ENVIRONMENT = "environment"
    """``BaseEnv.is_correct``."""
    REWARD = "reward above 0"
    """Nobody has said whether it is correct: its reward decides."""


@dataclass
class Action:
    """An agent's decision; ``BaseEnv.step`` gets its ``action``, without this wrapper."""

    action: Any = None


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
    forked_from: str = ""
    """The member of its group, such as 0001, whose first turns it begins with; empty for one that begins with
    the task."""
    num_shared_turns: int = 0
    """Number of those turns: they were sampled once, for the other member."""

    _turns: ClassVar[Turns | None] = None
    """Set in a trajectory that has come from another process, until its steps are read."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: turns in columns, or steps where JSON would change a value of theirs."""
        turns = self._arrived or Turns.exact(self.steps)
        state = {name: value for name, value in self.__dict__.items() if name not in ("steps", "_turns")}
        return state | ({"steps": share(self.steps)} if turns is None else {"_turns": turns})

    def __getattr__(self, name: str) -> Any:
        """Make ``steps`` of the columns that have arrived. From then on the trajectory holds its steps.

        Another thread, which writes the log, may make them at the same time: the first ones are kept.
        """
        if name == "steps" and (turns := self._turns) is not None:
            self.__dict__.setdefault(name, turns.steps())
            self.__dict__.pop("_turns", None)
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    @property
    def _arrived(self) -> Turns | None:
        """The columns that have arrived, unless the trajectory holds steps, made of them or others."""
        return None if "steps" in self.__dict__ else self._turns

    @property
    def columns(self) -> Turns:
        """The turns in columns: as they have arrived, or those of the steps as they are now."""
        return self._arrived or Turns.of(self.steps)

    @property
    def turns(self) -> Sequence[Step | Turn]:
        """The steps as far as their tokens are learned from: no step is made for it."""
        arrived = self._arrived
        return self.steps if arrived is None else arrived.rows

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
    def seat_rewards(self) -> dict[str, float]:
        """The sum of the step rewards of each seat that has moved; all of it under ``""`` where none is
        named."""
        if not any(turn.seat for turn in self.turns):
            return {"": self.reward}
        rewards: dict[str, float] = {}
        for turn in self.turns:
            rewards[turn.seat] = rewards.get(turn.seat, 0.0) + turn.reward
        return rewards

    @property
    def has_answer(self) -> bool:
        """Return whether it has ended in an answer, good or bad, to which a client may reply."""
        reason = self.termination_reason
        has_ended_well = reason is not None and not reason.is_failure
        return bool(self.turns) and has_ended_well and reason is not TerminationReason.TIMEOUT

    @property
    def completions(self) -> list[Completion]:
        """The completions, turn by turn; a turn that the agent's own code decided has none."""
        return [turn.completion for turn in self.turns if turn.completion is not None]

    @property
    def own_completions(self) -> list[Completion]:
        """The completions that were sampled for it, and not for the member that it forks from."""
        own = self.turns[self.num_shared_turns :]
        return [turn.completion for turn in own if turn.completion is not None]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that were sampled in all of its own turns."""
        return sum(completion.num_completion_tokens for completion in self.own_completions)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of its budget that it has used: all sampled tokens, and those that a later prompt has more
        than the turn that it goes on from, mostly the one before. An agent that rewrites its history gets
        nothing back.
        """
        used, earlier = 0, list[Completion]()
        for completion in self.completions:
            extended = (each for each in reversed(earlier) if completion.extends(each))
            if (before := next(extended, earlier[-1] if earlier else None)) is not None:
                used += max(0, completion.num_prompt_tokens - before.num_tokens)
            used += completion.num_completion_tokens
            earlier.append(completion)
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
