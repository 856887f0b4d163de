from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import random
from importlib.util import find_spec

import pytest

from environments.adapters import reasoning_gym
from environments.adapters.reasoning_gym import ReasoningGymEnvironment, answer_in, reasoning_gym_tasks
from environments.errors import ConfigError, DatasetError
from policies import GameAgent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is an extra: worlds"),
]

NAMES = ["chain_sum", "spell_backward", "basic_arithmetic", "leg_counting", "mini_sudoku", "countdown"]


def judged(task, response):
    env = ReasoningGymEnvironment.from_dict(task)
    env.reset()
    observation, reward, done, info = env.step(response)
    assert (observation, done) == ({}, True)
    return reward, info


@pytest.mark.parametrize("name", NAMES)
def test_librarys_own_answer_is_worth_one(name):
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


def test_question_from_the_global_generator_is_the_same_again():
    random.seed(7)
    state = random.getstate()
    tasks = reasoning_gym_tasks("list_functions", 3, seed=1)
    for task in (*tasks, *tasks):
        assert ReasoningGymEnvironment.from_dict(task).reset()[0] == {"question": task["question"]}
    assert random.getstate() == state


def test_agent_plays_it():
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


def test_answer_that_breaks_its_verifier_is_worth_nothing(caplog):
    task = reasoning_gym_tasks("prime_factorization", 1)[0]
    with caplog.at_level(logging.WARNING):
        reward, info = judged(task, "two times three")
    assert reward == 0.0
    assert "ValueError" in info["error"]
    assert "prime_factorization" in caplog.text


@pytest.mark.parametrize("name", ["countdown", "simple_integration"])
def test_answer_is_not_run(name, tmp_path):
    task = reasoning_gym_tasks(name, 1)[0]
    note = tmp_path / "note"
    assert judged(task, f"__import__('os').system('touch {note}')")[0] < 0.5
    assert not note.exists()


def test_verdict_whose_process_dies_is_worth_nothing_and_is_told(monkeypatch):
    dataset = ["chain_sum", 0, 1, "{}"]
    entry = base64.b64encode(pickle.dumps({"question": "1 + 1 =", "answer": "2"})).decode()
    monkeypatch.setattr(reasoning_gym, "is_data", lambda *arguments: os._exit(3))
    assert reasoning_gym.score(dataset, entry, "2") == {"error": "the process of the verdict ended with 3."}


def test_what_a_verifier_changes_ends_with_its_verdict(monkeypatch):
    dataset = ["chain_sum", 0, 1, "{}"]
    entry = base64.b64encode(pickle.dumps({"question": "1 + 1 =", "answer": "2"})).decode()
    verifier = type(reasoning_gym._dataset(*dataset))
    rewards = [0.5, 0.25]
    monkeypatch.setattr(verifier, "score_answer", lambda self, answer, entry: rewards.pop(0))
    assert [reasoning_gym.score(dataset, entry, "2")["reward"] for _ in range(2)] == [0.5, 0.5]


@pytest.mark.slow
def test_verdict_without_end_costs_its_time_limit_alone(monkeypatch):
    task = reasoning_gym_tasks("simple_integration", 1)[0]
    judged(task, "1")
    monkeypatch.setattr(reasoning_gym, "TIME_LIMIT_SECONDS", 0.5)
    reward, info = judged(task, "9**9**9**9")
    assert (reward, info["error"]) == (0.0, "could not be graded in 0.5 s.")
    monkeypatch.undo()
    assert judged(task, info["expected"])[0] == 1.0


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
        ({"name": "composite", "config": {"datasets": [{"name": "countdown"}]}}, "does not accept"),
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


@pytest.mark.parametrize("name", ["countdown", "fraction_simplification", "rubiks_cube", "chain_sum"])
def test_only_the_full_score_is_a_success(name):
    env = ReasoningGymEnvironment(name, seed=1, size=1)
    env.reset()
    assert env.is_correct() is None
    _, reward, _, info = env.step("I do not know")
    assert reward < 1
    assert env.is_correct() is False
    env.reset()
    env.step(info["expected"])
    assert env.is_correct() is (name != "rubiks_cube"), "whose expected answer is an example, not a solution"
