"""Rewards of finished trajectories, given by another reward function, or to a group as a whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from environments.rewards.base import GroupReward, RewardFunction, RewardOutput, judge, judge_group
from environments.tool_environment import answer_of
from environments.types import Step, TerminationReason, Trajectory, TrajectoryGroup

COMPARED = "compared"
"""Key of the last step's info of a trajectory that was judged beside the others of its group."""


def regraded(trajectory: Trajectory, reward_fn: RewardFunction) -> Trajectory:
    """A copy of ``trajectory`` with the rewards that ``reward_fn`` gives it.

    It judges what Troupe's environments have judged: every step that is an answer, which is a text or a
    ``finish`` call. A step of tool calls keeps its reward. A trajectory that failed or ran out of time was
    judged by nobody, and stays as it is. The steps' ``mc_return`` and ``info`` are of the former rewards.

    Raises:
        EnvironmentFailure: ``reward_fn`` returned no verdict.
    """
    answers = _answers(trajectory)
    return _rewarded(
        trajectory,
        [None if each is None else judge(reward_fn, trajectory.task, each) for each in answers],
    )


def regraded_group(group: TrajectoryGroup, reward_fn: RewardFunction) -> TrajectoryGroup:
    """``group`` with the rewards that ``reward_fn`` gives: together where it compares, else to each one.

    Where it compares, the last answer of a trajectory gets the verdict, and those before it 0. A trajectory
    without an answer takes part with an empty one, and stays as it is; one that has failed takes no part. A
    group in which only one is left cannot be compared, and is ``unjudged_group``.

    Raises:
        EnvironmentFailure: ``reward_fn`` returned no verdict.
    """
    rollouts = group.rollouts
    if not isinstance(reward_fn, GroupReward) or len(rollouts) == 1:
        return _with_rollouts(group, [regraded(each, reward_fn) for each in rollouts])
    whole = [each for each in rollouts if not each.failed]
    if len(whole) < 2:
        return unjudged_group(group, f"All but {len(whole)} of its group failed: nothing to compare it with.")
    if any(len(each.seat_rewards) > 1 for each in whole):
        return unjudged_group(group, "It has several seats, and answers of one agent are compared.")
    answers = [next((each for each in reversed(_answers(one)) if each is not None), None) for one in whole]
    verdicts = judge_group(reward_fn, group.task, [each or "" for each in answers])
    judged = {one.rollout_id: _compared(one, verdict) for one, verdict in zip(whole, verdicts, strict=True)}
    return _with_rollouts(group, [judged.get(each.rollout_id, each) for each in rollouts])


def unjudged_group(group: TrajectoryGroup, error: str) -> TrajectoryGroup:
    """``group`` without a verdict, because of ``error``: all of it has failed, and nothing is learned."""
    failure = partial(replace, termination_reason=TerminationReason.UNJUDGED, error=error)
    rollouts = [each if each.failed else failure(each) for each in group.rollouts]
    return _with_rollouts(group, rollouts)


def needs_comparison(trajectory: Trajectory) -> bool:
    """Return whether it has to be judged beside others, and was not. One without a turn has no answer."""
    return not trajectory.failed and any(COMPARED not in step.info for step in trajectory.steps[-1:])


def _answers(trajectory: Trajectory) -> list[str | None]:
    """The answer that each step is; ``None`` for a step that is none, and where nobody judges."""
    if trajectory.failed or trajectory.termination_reason is TerminationReason.TIMEOUT:
        return [None] * len(trajectory.steps)
    return [_answer(step) for step in trajectory.steps]


def _answer(step: Step) -> str | None:
    """The answer that a step is; ``None`` if it is none. An agent without actions answers by its text."""
    is_action = isinstance(step.action, str | list | dict)
    return answer_of(step.action if is_action else step.model_response)


def _compared(trajectory: Trajectory, verdict: RewardOutput) -> Trajectory:
    verdicts = [None if each is None else RewardOutput(0.0) for each in _answers(trajectory)]
    last = next((index for index in reversed(range(len(verdicts))) if verdicts[index]), None)
    steps = [*trajectory.steps]
    if last is not None:
        verdicts[last] = verdict
        trajectory = _rewarded(trajectory, verdicts)
        steps = [*trajectory.steps]
        steps[last] = _changed(steps[last], info={**steps[last].info, "metadata": verdict.metadata})
    steps[-1:] = [_changed(each, info={**each.info, COMPARED: True}) for each in steps[-1:]]
    return replace(trajectory, steps=steps)


def _rewarded(trajectory: Trajectory, verdicts: Sequence[RewardOutput | None]) -> Trajectory:
    """A copy of ``trajectory`` with a verdict on each step that is an answer."""
    pairs = zip(trajectory.steps, verdicts, strict=True)
    steps = [step if verdict is None else _changed(step, reward=verdict.reward) for step, verdict in pairs]
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


def _changed(step: Step, **fields: object) -> Step:
    """A copy of ``step`` with other ``fields``, whose messages stay shared with other steps."""
    twin = copy.copy(step)
    vars(twin).update(fields)
    return twin


def _with_rollouts(group: TrajectoryGroup, rollouts: Sequence[Trajectory]) -> TrajectoryGroup:
    members = tuple(rollouts[: len(group.trajectories)])
    return replace(group, trajectories=members, baseline=group.baseline and rollouts[-1])
