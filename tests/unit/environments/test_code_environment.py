from __future__ import annotations

import pytest

from environments import ConfigError, RewardOutput
from environments.code_environment import CodeEnvironment, feedback
from environments.errors import DatasetError

TASK = {
    "question": "Read two numbers and print their sum.",
    "tests": [
        {"input": "1 2", "output": "3"},
        {"input": "5 5", "output": "10"},
        {"input": "7 0", "output": "7", "private": True},
    ],
}
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
WRONG = "```python\na, b = map(int, input().split())\nprint(a * b)\n```"


def test_first_observation_is_the_question_alone():
    assert CodeEnvironment(TASK).reset() == ({"question": TASK["question"]}, {})


@pytest.mark.slow
def test_right_answer_ends_the_episode():
    env = CodeEnvironment(TASK, max_turns=3)
    env.reset()
    observation, reward, done, info = env.step(RIGHT)
    assert (observation, reward, done) == ({}, 1.0, True)
    assert info["metadata"]["num_passed"] == 3
    assert info["question"] == TASK["question"]


@pytest.mark.slow
def test_wrong_answer_is_shown_the_public_tests_that_failed():
    env = CodeEnvironment(TASK)
    env.reset()
    observation, reward, done, _ = env.step(WRONG)
    assert (reward, done) == (0.0, False)
    assert observation["question"] == (
        "Your program failed 3 of 3 tests.\n\n"
        "Input:\n1 2\nExpected:\n3\nGot:\n2\n\n"
        "Input:\n5 5\nExpected:\n10\nGot:\n25"
    )


def test_no_more_than_max_tests_are_shown():
    env = CodeEnvironment(TASK, max_tests=1)
    env.reset()
    assert env.step(WRONG)[0]["question"].count("Input:") == 1


@pytest.mark.slow
def test_error_and_a_missing_program_are_told():
    env = CodeEnvironment(TASK, max_turns=5)
    env.reset()
    assert "Error:\nsolution.py, line 1: 1 / 0" in env.step("```python\n1 / 0\n```")[0]["question"]
    assert "no complete fenced code block" in env.step("I cannot.")[0]["question"]
    assert "Got:\n(nothing)" in env.step("```python\npass\n```")[0]["question"]


@pytest.mark.slow
def test_reward_is_that_of_each_answer_until_turns_are_used_up():
    env = CodeEnvironment(TASK, max_turns=2)
    env.reset()
    assert env.step(WRONG)[1:3] == (0.0, False)
    assert env.step(WRONG)[1:3] == (0.0, True)
    env.reset()
    assert env.step(WRONG)[1:3] == (0.0, False)
    assert env.step(RIGHT)[1:3] == (1.0, True)


def test_another_reward_function_may_judge():
    env = CodeEnvironment(TASK, reward_fn=lambda task_info, action: RewardOutput(0.5, {"error": "Too long."}))
    env.reset()
    observation, reward, done, _ = env.step(RIGHT)
    assert (observation, reward, done) == ({"question": "Your answer is wrong. Too long."}, 0.5, False)
    assert feedback(RewardOutput(0.0), 2) == "Your answer is wrong."


def test_it_is_made_from_a_dict():
    env = CodeEnvironment.from_dict({**TASK, "max_turns": 4, "max_tests": 0})
    assert (env.task, env.max_turns, env.max_tests) == (TASK, 4, 0)


@pytest.mark.parametrize(("task", "error"), [({"tests": []}, DatasetError), (None, ConfigError)])
def test_task_without_a_question_is_refused_at_once(task, error):
    with pytest.raises(error, match="question"):
        CodeEnvironment(task).reset()


def test_program_is_right_when_its_judge_agrees():
    verdicts = iter([RewardOutput(1.0, is_correct=False), RewardOutput(0.3, is_correct=True)])
    env = CodeEnvironment(TASK, max_turns=3, reward_fn=lambda task_info, action: next(verdicts))
    env.reset()
    observation, reward, done, _ = env.step(RIGHT)
    assert (reward, done, env.is_correct()) == (1.0, False, False)
    assert observation["question"] == "Your answer is wrong."
    observation, reward, done, _ = env.step(RIGHT)
    assert (observation, reward, done, env.is_correct()) == ({}, 0.3, True, True)
