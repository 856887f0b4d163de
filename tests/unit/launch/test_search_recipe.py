from __future__ import annotations

import json

import pytest

from environments import ToolEnvironment
from environments.data.search_questions import search_passages, search_questions
from launch.recipes.search import AGENT_ARGS, ENV_ARGS, TOOL_MAP, oracle_replies, workload
from policies import ToolAgent

QUESTIONS = search_questions()


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROUPE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def play(task, replies):
    """Play without Ray; return the texts of the tool's messages, and reward and info at the end."""
    agent, env = ToolAgent(**AGENT_ARGS), ToolEnvironment.from_dict({**task, **ENV_ARGS})
    observation, info = env.reset()
    agent.reset()
    agent.update_from_env(observation, 0.0, False, info)
    for reply in replies:
        observation, reward, done, info = env.step(agent.update_from_model(reply).action)
        agent.update_from_env(observation, reward, done, info)
    assert done
    return (
        [message["content"] for message in agent.chat_completions if message["role"] == "tool"],
        reward,
        info,
    )


@pytest.mark.parametrize("task", QUESTIONS, ids=lambda task: task["id"])
def test_oracle_searches_twice_finds_both_passages_and_answers(task):
    outputs, reward, info = play(task, oracle_replies(task))
    texts = {row["title"]: row["text"] for row in search_passages()}
    assert len(outputs) == 2
    for title, output in zip(task["supporting_facts"], outputs, strict=True):
        assert f"] {title}\n{texts[title]}" in output
    assert reward == 1.0
    assert info["metadata"]["em"] is True


def test_wrong_answer_earns_nothing():
    task = QUESTIONS[0]
    assert play(task, [*oracle_replies(task)[:2], r"\boxed{Fennport}"])[1] == 0.0


def test_question_finds_its_first_passage_not_always_its_second():
    index = TOOL_MAP["local_search"].index()
    ranks = []
    for task in QUESTIONS:
        titles = [passage.title for passage, _ in index.search(task["question"], 5)]
        ranks.append([title in titles for title in task["supporting_facts"]])
    assert sum(any(found) for found in ranks) == len(QUESTIONS)
    assert sum(all(found) for found in ranks) >= 0.75 * len(QUESTIONS)
    assert not all(all(found) for found in ranks)  # or there would be nothing to learn


def test_each_question_is_answered_by_its_passages_alone():
    texts = {row["title"]: row["text"] for row in search_passages()}
    for task in QUESTIONS:
        first, second = task["supporting_facts"]
        if task["type"] == "bridge":
            assert task["answer"] in texts[second]
            assert task["answer"] not in texts[first] or second in texts[first]
            assert task["answer"] not in task["question"]


def test_corpus_is_small_distinct_and_mostly_beside_point():
    rows = search_passages()
    assert len({row["title"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)
    assert 60 <= len(rows) <= 100
    needed = {title for task in QUESTIONS for title in task["supporting_facts"]}
    assert needed < {row["title"] for row in rows}
    assert all(row["text"].count(". ") >= 1 for row in rows)


def test_held_out_questions_are_the_same_for_every_seed():
    one, two = workload(seed=1), workload(seed=2)
    assert list(one.val_dataset) == list(two.val_dataset)
    ids = [{task["id"] for task in split} for split in (one.train_dataset, one.val_dataset)]
    assert (len(ids[0]), len(ids[1]), ids[0] & ids[1]) == (16, 8, set())
    assert {task["type"] for task in one.val_dataset} == {"bridge", "comparison"}
    assert list(one.train_dataset) != list(two.train_dataset)


def test_demonstrations_are_of_training_and_end_with_an_answer():
    made = workload(seed=0)
    held_out = {task["question"] for task in made.val_dataset}
    for conversation in made.demonstrations:
        assert [message["role"] for message in conversation[2:]] == ["assistant", "tool"] * 2 + ["assistant"]
        assert conversation[1]["content"] not in held_out
        assert r"\boxed{" in conversation[-1]["content"]


def test_tasks_are_json_and_the_agent_is_told_no_answer():
    task = QUESTIONS[0]
    assert json.loads(json.dumps(task)) == task
    agent = ToolAgent(**AGENT_ARGS)
    agent.update_from_env(ToolEnvironment.from_dict({**task, **ENV_ARGS}).reset()[0], 0.0, False, {})
    assert task["answer"] not in json.dumps(agent.chat_completions)
