"""Questions that need two searches: the first passage names what to search for next."""

from __future__ import annotations

from typing import Any

from environments import ToolEnvironment
from environments.data.search_questions import search_passages, search_questions
from environments.rewards.search import search_reward_fn
from environments.tools.retrieval import LocalRetrievalTool
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate, written_call
from launch.workload import Workload
from policies import ToolAgent

SEARCH_SYSTEM_PROMPT = (
    "You answer questions about the country of Aldermere. Search until you have read the answer: where a "
    "question leads through one thing to another, search for the first and then for what you found. Put the "
    "final answer, as few words as possible, in \\boxed{}."
)
HELD_OUT = 3
"""Every third question, of both types, is held out; the seed makes no difference."""

TOOL_MAP = {"local_search": LocalRetrievalTool.over(search_passages())}
AGENT_ARGS: dict[str, Any] = {
    "system_prompt": SEARCH_SYSTEM_PROMPT,
    "parser_name": "qwen",
    "tool_map": TOOL_MAP,
}
ENV_ARGS: dict[str, Any] = {"tool_map": TOOL_MAP, "reward_fn": search_reward_fn, "max_steps": 20}


def workload(seed: int) -> Workload:
    """The questions, two thirds to train on, with one demonstration of each of these."""
    questions = search_questions()
    held_out = questions.select(range(HELD_OUT - 1, len(questions), HELD_OUT))
    rest = questions.select(index for index in range(len(questions)) if index % HELD_OUT != HELD_OUT - 1)
    return Workload(
        agent_class=ToolAgent,
        env_class=ToolEnvironment,
        train_dataset=rest.shuffle(seed),
        val_dataset=held_out,
        agent_args=AGENT_ARGS,
        env_args=ENV_ARGS,
        demonstrations=Demonstrations(_demonstration, rest),
    )


def _demonstration(task: dict[str, Any]) -> Demonstration:
    env = ToolEnvironment.from_dict({**task, **ENV_ARGS})
    return demonstrate(ToolAgent(**AGENT_ARGS), env, oracle_replies(task))


def oracle_replies(task: dict[str, Any]) -> list[str]:
    """The replies of a model that knows the passages: one search for each of them, then the answer."""
    searches = [written_call("local_search", query=title) for title in task["supporting_facts"]]
    return [*searches, f"\\boxed{{{task['answer']}}}"]
