"""Rewards given anew: of answers, and of nothing that no environment has judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from environments import RewardOutput, Step, TerminationReason, ToolEnvironment, Trajectory
from environments.errors import EnvironmentFailure
from environments.regrading import regraded


def call(name: str, arguments: str) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]


CALL = call("calculator", '{"expression": "1+1"}')
FINISH = call("finish", '{"response": "two"}')


def length(task_info: dict[str, Any], action: str) -> RewardOutput:
    """The length of the answer, which is correct if the task has it."""
    return RewardOutput(len(action), is_correct=action == task_info["answer"])


def played(*actions: Any, reason: TerminationReason = TerminationReason.ENV_DONE) -> Trajectory:
    steps = [Step(action=action, model_response="text", reward=0.25) for action in actions]
    return Trajectory(
        task={"answer": "two"}, steps=steps, reward=0.25 * len(steps), termination_reason=reason
    )


def test_only_answers_of_a_trajectory_are_judged_again() -> None:
    before = played(CALL, "wrong answer")
    after = regraded(before, length)
    assert [step.reward for step in after.steps] == [0.25, 12.0]
    assert (after.reward, after.is_correct, after.by_reward_function) == (12.25, False, True)
    assert before == played(CALL, "wrong answer"), "the stored one stays as it was"


def test_finish_call_and_text_without_an_action_are_answers() -> None:
    assert regraded(played(FINISH), length).is_correct is True
    assert regraded(played(None), length).reward == len("text")


@pytest.mark.parametrize(
    "trajectory",
    [
        played("two", reason=TerminationReason.TIMEOUT),
        played("two", reason=TerminationReason.AGENT_ERROR),
        played(CALL, reason=TerminationReason.MAX_STEPS),
        played(),
    ],
)
def test_trajectory_that_nobody_judged_stays_as_it_is(trajectory: Trajectory) -> None:
    assert regraded(trajectory, length) == replace(trajectory)


def test_regrading_agrees_with_the_environment_that_judged() -> None:
    for action in ("two", FINISH, CALL):
        env = ToolEnvironment(task={"answer": "two"}, reward_fn=length, max_steps=2)
        env.reset()
        _, reward, _, _ = env.step(action)
        trajectory = played(action)
        trajectory.steps[0].reward = trajectory.reward = reward
        assert regraded(trajectory, length).reward == reward


def test_verdict_that_is_no_number_is_an_error() -> None:
    with pytest.raises(EnvironmentFailure, match="returned 'good'"):
        regraded(played("two"), lambda task_info, action: "good")  # type: ignore[arg-type, return-value]
