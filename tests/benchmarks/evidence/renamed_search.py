"""The two-search questions of the shipped corpus in many worlds, where numbers stand for its names.

The corpus ``aldermere`` has 16 questions that lead through one passage to another: too few to hold some out,
and a model of 0.35 M parameters cannot spell its names. A world is its passages and questions with a number
of five digits for each title, which no other world has. Its questions are those whose answer is a title, too,
so that none can be known without a search.

Of the demonstrations, some search twice and read the answer; the others stop halfway, and answer with the
title that the first passage leads to.
"""

from __future__ import annotations

import random
import re
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
WORLDS, HELD_OUT = 250, 30
"""All of them, and the first ones, which are held out."""
Script = tuple[dict[str, Any], list[str]]
"""A task, and what the model says to it."""


class Search(LocalRetrievalTool):
    """Shows the one passage that fits best: a small model reads few tokens."""

    name = "search"

    def forward(self, query: str) -> ToolOutput:
        return super().forward(query, top_k=1)


class SearchEnvironment(ToolEnvironment):
    """Metrics: ``searched_twice`` is 1 if two searches came before the answer or the end."""

    def compute_metrics(self) -> dict[str, float]:
        return {"searched_twice": float(self.step_count > 2)}


def worlds() -> tuple[list[list[dict[str, Any]]], list[dict[str, str]]]:
    """The tasks of each world, and the passages of all."""
    passages, titles = search_passages(), [row["title"] for row in search_passages()]
    questions = list(filter(_is_of_titles, search_questions()))
    longest_first = sorted(titles, key=len, reverse=True)
    title = re.compile(rf"\b(?:(?:The|the|A) )?({'|'.join(map(re.escape, longest_first))})\b")
    numbers = iter(random.Random(0).sample(range(10_000, 100_000), WORLDS * len(titles)))
    tasks, corpus = [], []
    for _ in range(WORLDS):
        known = {each: str(next(numbers)) for each in titles}

        def renamed(text: str, known: dict[str, str] = known) -> str:
            return title.sub(lambda found: known[found[1]], text)

        corpus += [{key: renamed(row[key]) for key in ("title", "text")} for row in passages]
        tasks.append(
            [
                {key: renamed(each[key]) for key in ("question", "answer")}
                | {"supporting_facts": [known[each_title] for each_title in each["supporting_facts"]]}
                for each in questions
            ]
        )
    return tasks, corpus


def _is_of_titles(question: dict[str, Any]) -> bool:
    """Whether each passage that is needed is named by what was read before, and the answer is a title."""
    texts = {row["title"]: row["text"] for row in search_passages()}
    first, second = question["supporting_facts"]
    is_read = first in question["question"] and second in texts[first] and question["answer"] in texts[second]
    return question["type"] == "bridge" and is_read and question["answer"] in texts


TASKS, _corpus = worlds()
TOOLS = {"search": Search.over(_corpus)}
AGENT_ARGS: dict[str, Any] = {"system_prompt": "", "parser_name": "hermes-brief", "tool_map": TOOLS}
ENV_ARGS: dict[str, Any] = {"tool_map": TOOLS, "reward_fn": search_reward_fn}


def workload(seed: int) -> Workload:
    """The held-out tasks are the same for every seed."""
    held_out, rest = (
        [task for tasks in part for task in tasks] for part in (TASKS[:HELD_OUT], TASKS[HELD_OUT:])
    )
    return Workload(
        agent_class=ToolAgent,
        env_class=SearchEnvironment,
        train_dataset=Dataset(rest, name="renamed", split="train").shuffle(seed),
        val_dataset=Dataset(held_out, name="renamed", split="test"),
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
