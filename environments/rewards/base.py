"""The protocol of reward functions, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, TypeGuard, runtime_checkable

from environments.errors import DatasetError, EnvironmentFailure

MAX_REWARD = 1e15
"""Most that a reward may be, above and below 0: where the learner squares larger ones, in 32 bits, they are
infinite, and one of them leaves nothing to learn from all others."""


@dataclass(frozen=True)
class RewardOutput:
    """The verdict on one answer. ``metadata`` gives the reasons."""

    reward: float
    metadata: dict[str, Any] = field(default_factory=dict)
    is_correct: bool | None = None
    """True where the answer counts as a success, whatever its reward; ``None`` leaves that to the
    environment, or else to a reward above 0."""

    @property
    def is_success(self) -> bool:
        """Return whether the answer counts as a success where the environment says nothing."""
        return self.reward > 0 if self.is_correct is None else self.is_correct


LATER = RewardOutput(0.0, {"later": True})
"""Result of a rollout function whose reward will come after its rollout has ended."""


class RewardFunction(Protocol):
    """Judges an answer. It is called with keywords, so the parameters have to have these names."""

    def __call__(self, task_info: dict[str, Any], action: str) -> RewardOutput | float: ...


@runtime_checkable
class GroupReward(RewardFunction, Protocol):
    """Judges the answers of a training group beside each other, as the reward of a workload.

    Where there is no group (evaluations, ``launch.evaluate``, ``play``, ``serve``, an engine), it is called
    with one answer, as any reward function.
    """

    @property
    def concurrency(self) -> int:
        """Most groups in judgement at once."""
        ...

    def compare(
        self, task_info: dict[str, Any], actions: Sequence[str]
    ) -> Sequence[RewardOutput | float]: ...


UNJUDGED = RewardOutput(0.0)
"""Stands for the verdict on an answer that is compared with others later."""


def unjudged(task_info: dict[str, Any], action: Any) -> RewardOutput:
    """The reward function of answers that nobody judges: 0, whatever the answer."""
    return UNJUDGED


def judge(reward_fn: RewardFunction, task: dict[str, Any], action: Any) -> RewardOutput:
    """Call ``reward_fn`` and check its verdict; a plain number becomes a RewardOutput.

    Raises:
        EnvironmentFailure: it returned neither a number nor a RewardOutput, the reward is no number up to
            ``MAX_REWARD``, or ``is_correct`` is neither true, false nor None.
    """
    return _checked(reward_fn, reward_fn(task_info=task, action=action))


def judge_group(
    reward_fn: RewardFunction, task: dict[str, Any], actions: Sequence[str]
) -> list[RewardOutput]:
    """The checked verdicts of ``reward_fn`` on the answers of a group: on each alone if it does not compare.

    Raises:
        EnvironmentFailure: as ``judge`` does, or there is not one verdict on each.
    """
    if not isinstance(reward_fn, GroupReward):
        return [judge(reward_fn, task, each) for each in actions]
    verdicts = reward_fn.compare(task_info=task, actions=actions)
    if len(verdicts) != len(actions):
        raise _failure(reward_fn, f"{len(verdicts)} verdicts on {len(actions)} answers: return one on each.")
    return [_checked(reward_fn, each) for each in verdicts]


def _checked(reward_fn: RewardFunction, verdict: RewardOutput | float) -> RewardOutput:
    output = RewardOutput(verdict) if is_number(verdict) else verdict
    if not isinstance(output, RewardOutput):
        raise _failure(reward_fn, f"{verdict!r}: return a RewardOutput.")
    if not is_reward(output.reward):
        raise _failure(reward_fn, f"{output.reward!r}: it has to be a finite number up to {MAX_REWARD:g}.")
    if output.is_correct is None and type(output.reward) is float:
        return output
    if output.is_correct is not None and not is_bool(output.is_correct):
        raise _failure(reward_fn, f"is_correct={output.is_correct!r}: it has to be True, False or None.")
    is_correct = None if output.is_correct is None else bool(output.is_correct)
    return replace(output, reward=float(output.reward), is_correct=is_correct)


def _failure(reward_fn: RewardFunction, returned: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"The reward function {reward_fn} returned {returned}")


def lacking(task: dict[str, Any], what: str, remedy: str) -> DatasetError:
    """The error of a task that has not what a reward function needs."""
    keys = ", ".join(sorted(task)) or "none"
    return DatasetError(f"The task has no {what} (its keys: {keys}): {remedy}")


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a real number or a bool, as Python's or as numpy's."""
    return isinstance(value, Real) or is_bool(value)


def is_reward(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a number that the learner can compute with."""
    return is_number(value) and bool(abs(value) <= MAX_REWARD)


def is_bool(value: Any) -> bool:
    """Return whether ``value`` is true or false, as Python's or as numpy's."""
    return type(value).__name__ in ("bool", "bool_")
