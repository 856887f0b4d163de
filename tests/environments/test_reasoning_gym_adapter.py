from __future__ import annotations

import json
import logging

import pytest

from environments.adapters.reasoning_gym import ReasoningGymEnvironment, answer_in, reasoning_gym_tasks
from environments.errors import ConfigError, DatasetError
from policies import GameAgent

pytest.importorskip("reasoning_gym")

NAMES = ["chain_sum", "spell_backward", "basic_arithmetic", "leg_counting", "mini_sudoku", "countdown"]


def judged(task, response):
    env = ReasoningGymEnvironment.from_dict(task)
    env.reset()
    observation, reward, done, info = env.step(response)
    assert (observation, done) == ({}, True)
    return reward, info


@pytest.mark.parametrize("name", NAMES)
def test_the_librarys_own_answer_is_worth_one(name):
    for task in reasoning_gym_tasks(name, 3, seed=5):
        expected = judged(task, "")[1]["expected"]
        assert judged(task, f"<think>hm</think>It is <answer>{expected}</answer>.")[0] == 1.0
        assert judged(task, "no idea")[0] < 0.5


def test_tasks_survive_json_and_make_the_same_question():
    tasks = reasoning_gym_tasks("chain_sum", 4, seed=1, max_terms=3)
    assert len({task["question"] for task in tasks}) == 4
    for task in tasks:
        env = ReasoningGymEnvironment.from_dict({**json.loads(json.dumps(task)), "rest": 1})
        assert env.reset() == ({"question": task["question"]}, {})
    other = reasoning_gym_tasks("chain_sum", 4, seed=2, max_terms=3)
    assert [task["question"] for task in other] != [task["question"] for task in tasks]


def test_an_agent_plays_it():
    task = reasoning_gym_tasks("chain_sum", 1, seed=1, min_terms=2, max_terms=2)[0]
    env, agent = ReasoningGymEnvironment.from_dict(task), GameAgent()
    agent.update_from_env(*env.reset()[:1], 0.0, False, {})
    question = agent.chat_completions[0]["content"]
    sum_of_two = question.split(":")[1].strip(" =").split()
    first, sign, second = int(sum_of_two[0]), sum_of_two[1], int(sum_of_two[2])
    answer = first + second if sign == "+" else first - second
    assert env.step(agent.update_from_model(f"<think>easy</think>{answer}").action)[1] == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        ("<think>13</think> 12\n", "12"),
        ("<answer>11</answer> no, <answer> 12 </answer>!", "12"),
        (r"so \boxed{12}.", "12"),
        (r"\boxed{11} <answer>12</answer>", "12"),
        ("<think><answer>11</answer></think>", ""),
    ],
)
def test_where_the_answer_is(text, answer):
    assert answer_in(text) == answer


def test_an_answer_that_breaks_the_verifier_is_worth_nothing_and_is_told(caplog):
    task = reasoning_gym_tasks("prime_factorization", 1)[0]
    with caplog.at_level(logging.WARNING):
        reward, info = judged(task, "two times three")
    assert reward == 0.0
    assert info["error"].startswith("ValueError")
    assert "prime_factorization" in caplog.text


def test_another_question_than_the_tasks_is_refused():
    task = reasoning_gym_tasks("chain_sum", 1)[0]
    with pytest.raises(DatasetError, match="another question"):
        ReasoningGymEnvironment.from_dict({**task, "question": "1 + 1 ="})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "chain_sm"}, "Did you mean 'chain_sum'"),
        ({"name": "chain_sum", "config": {"terms": 1}}, "terms"),
        ({"name": "chain_sum", "config": {"min_terms": -1}}, "min_terms"),
        ({"name": "chain_sum", "index": 5, "size": 5}, "index=5"),
        ({}, "'name'"),
    ],
)
def test_bad_tasks_are_refused(task, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGymEnvironment.from_dict(task)


def test_no_tasks_are_refused():
    with pytest.raises(ConfigError, match="size=0"):
        reasoning_gym_tasks("chain_sum", 0)
