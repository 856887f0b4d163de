"""The data that flows through Troupe, from a task to a group of finished trajectories.

``Action``, ``Step`` and ``Trajectory`` keep the names and call shapes of rLLM v0.1, so agents written
against it run unchanged; they are mutable because agents fill them in as they play. What the engine
itself produces (``Completion``, ``TrajectoryGroup``) is frozen: nobody may edit what was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message in the OpenAI shape: ``{"role": ..., "content": ...}``."""


class TerminationReason(StrEnum):
    """Why a trajectory ended. Every trajectory that the engine returns carries one."""

    ENV_DONE = "env_done"
    """The environment said ``done``."""
    MAX_STEPS = "max_steps"
    """The step limit was reached before the environment was done."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The next prompt would not fit into the prompt budget or the model's context."""
    RESPONSE_BUDGET_SPENT = "response_budget_spent"
    """All tokens that the trajectory may hold after its first prompt are used up."""
    TIMEOUT = "timeout"
    """The trajectory ran longer than its time limit; its actor was ended."""
    ERROR = "error"
    """Agent, environment or infrastructure failed; ``Trajectory.error`` says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the engine sampled for one prompt. Token ids are born here and never recomputed from text.

    ``prompt_ids`` [P] and ``completion_ids`` [C] are what the model saw and said; ``logprobs`` [C] are
    natural logs under the distribution that was sampled from (after temperature). ``completion_ids``
    includes the end-of-sequence token where one was sampled, ``text`` does not. The ids are empty when
    an outside server does not return them: such a completion can be scored but not trained on.
    """

    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str
    finish_reason: str
    policy_version: int = 0


@dataclass
class Action:
    """What an agent decided to do; ``action`` is handed to ``BaseEnv.step`` unwrapped."""

    action: Any = None


@dataclass
class Step:
    """One turn. The agent fills the first group of fields, the engine the second."""

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


@dataclass
class Trajectory:
    """One agent's attempt at one task. ``reward`` is the sum of the step rewards."""

    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float = 0.0

    rollout_id: str = ""
    """``<group>/<member>``: unique within a run, the same when a run is resumed."""
    termination_reason: TerminationReason | None = None
    error: str | None = None
    seconds: float = 0.0
    """Wall time of the rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """All trajectories of one task that are compared with each other, in member order."""

    group_id: str
    task: Any
    trajectories: tuple[Trajectory, ...]
