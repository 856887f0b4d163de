"""The two-search questions of the shipped corpus in many worlds, each with names and numbers of its own.

The corpus ``aldermere`` has 16 questions that lead through one passage to another: too few to hold some out.
A world is its passages and questions with another made-up word for every name, and another number for every
one of three digits or more. The questions are those whose answer is then another one, so that none can be
known without a search. Held out are the shipped world, under its true names, and worlds of their own.

Of the demonstrations, some search twice and read the answer; the others stop halfway, and answer with the
name that the first passage leads to.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from environments import Dataset, ToolEnvironment
from environments.data.search_questions import search_passages, search_questions
from environments.rewards.search import search_reward_fn
from environments.tools import ToolOutput
from environments.tools.retrieval import LocalRetrievalTool
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate, written_call
from launch.workload import Workload
from policies import ToolAgent

SHARE = 0.4
"""Of the demonstrations that search twice."""
NUM_DEMONSTRATIONS = 4000
SHIPPED, HELD_OUT, WORLDS = 1, 21, 221
"""World 0 is the shipped one, the next ones are held out, and the rest is trained on."""
TIMES = 10
"""How often an evaluation plays each question of the shipped world."""
NAME = re.compile(r"[A-Z][a-z]+")
SYLLABLES = [first + vowel for first in "bdfghklmnprstvwz" for vowel in "aeiou"]
Script = tuple[dict[str, Any], list[str]]
"""A task, and what the model says to it."""


class Search(LocalRetrievalTool):
    """Shows the one passage that fits best: a small model reads few tokens."""

    name = "search"

    def forward(self, query: str) -> ToolOutput:
        return super().forward(query, top_k=1)


class SearchEnvironment(ToolEnvironment):
    """Metrics: ``exact`` is 1 if the answer is the expected one, ``searched_twice`` if it searched twice.

    The reward is that of the recipe ``search``: an answer with some of the words earns a part of it.
    """

    def compute_metrics(self) -> dict[str, float]:
        exact = super().compute_metrics().get("success_when_called", 0.0)
        return {"exact": exact, "searched_twice": float(self.step_count > 2)}


def worlds() -> tuple[list[list[dict[str, Any]]], list[dict[str, str]]]:
    """The tasks of each world, and the passages of all."""
    passages = search_passages()
    names = sorted({word for row in passages for word in NAME.findall(row["title"])} - {"The", "A", "On"})
    rng, new = random.Random(0), set[str]()
    while len(new) < WORLDS * len(names):
        new.add("".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize())
    words = rng.sample(sorted(new), len(new))
    tasks, corpus = [], []
    for world in range(WORLDS):
        mine = dict(zip(names, words[world * len(names) :], strict=False)) if world else {}
        change = partial(_renamed, names=mine, numbers=random.Random(world) if world else None, known={})
        corpus += [{key: change(row[key]) for key in ("title", "text")} for row in passages]
        tasks.append([_task(each, change) for each in search_questions()])
    return tasks, corpus


def _task(question: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    titles = [change(title) for title in question["supporting_facts"]]
    return {key: change(question[key]) for key in ("question", "answer")} | {"supporting_facts": titles}


def leads_on(number: int) -> bool:
    """Whether a question has another answer in another world, and each passage that it needs is found by its
    title, which stands in the question or in the passage before."""
    shipped, task = TASKS[0][number], TASKS[1][number]
    read = task["question"]
    for title in task["supporting_facts"]:
        ((found, _),) = TOOLS["search"].index().search(title, 1)
        if title not in read or found.title != title:
            return False
        read = found.text
    return task["answer"] in read and task["answer"] != shipped["answer"]


def _renamed(text: str, names: dict[str, str], numbers: random.Random | None, known: dict[str, str]) -> str:
    """The text with another word for each name, and the same other number wherever a number stands."""

    def number(found: re.Match[str]) -> str:
        assert numbers is not None
        if found[0] not in known:
            digits = re.sub(r"\d", lambda _: str(numbers.randint(1, 9)), found[0])
            known[found[0]] = digits
        return known[found[0]]

    text = NAME.sub(lambda found: names.get(found[0], found[0]), text)
    return text if numbers is None else re.sub(r"\d[\d,]{2,}(?!\d)", number, text)


TASKS, _corpus = worlds()
TOOLS = {"search": Search.over(_corpus)}
_kept = list(filter(leads_on, range(len(TASKS[0]))))
TASKS = [[tasks[number] for number in _kept] for tasks in TASKS]
AGENT_ARGS: dict[str, Any] = {"system_prompt": "", "parser_name": "hermes-brief", "tool_map": TOOLS}
ENV_ARGS: dict[str, Any] = {"tool_map": TOOLS, "reward_fn": search_reward_fn}


def workload(seed: int) -> Workload:
    """The held-out tasks are the same for every seed."""
    rest = [task for tasks in TASKS[HELD_OUT:] for task in tasks]
    others = [task for tasks in TASKS[SHIPPED:HELD_OUT] for task in tasks]
    shipped = [{**task, "time": time} for time in range(TIMES) for task in TASKS[0]]
    return Workload(
        agent_class=ToolAgent,
        env_class=SearchEnvironment,
        train_dataset=Dataset(rest, name="renamed", split="train").shuffle(seed),
        val_dataset={
            "other_names": Dataset(others, name="renamed", split="test"),
            "shipped": Dataset(shipped, name="aldermere"),
        },
        agent_args=AGENT_ARGS,
        env_args=ENV_ARGS,
        demonstrations=demonstrations(seed),
    )


def demonstrations(seed: int) -> Demonstrations[Script]:
    """Answers to questions of the training worlds, by two searches and by one."""
    rng = random.Random(seed)
    return Demonstrations(_play, [_script(rng) for _ in range(NUM_DEMONSTRATIONS)])


def _script(rng: random.Random) -> Script:
    task = rng.choice(rng.choice(TASKS[HELD_OUT:]))
    searches = [written_call("search", query=title) for title in task["supporting_facts"]]
    if rng.random() < SHARE:
        return task, [*searches, f"\\boxed{{{task['answer']}}}"]
    return task, [searches[0], f"\\boxed{{{task['supporting_facts'][1]}}}"]


def _play(script: Script) -> Demonstration:
    task, replies = script
    return demonstrate(ToolAgent(**AGENT_ARGS), ToolEnvironment.from_dict({**task, **ENV_ARGS}), replies)
