from __future__ import annotations

from typing import Any

import pytest

from environments.code_environment import CodeEnvironment
from environments.errors import AgentError
from environments.types import Trajectory
from policies.agents.answering import CODE_INSTRUCTION, REPAIR, CodingAgent

TASK = {"question": "Print the sum of two numbers.", "tests": [{"input": "2 3", "output": "5"}]}
WRONG = "<think>Multiply?</think>```python\na, b = map(int, input().split())\nprint(a * b)\n```"
RIGHT = "<think>Add!</think>```python\na, b = map(int, input().split())\nprint(a + b)\n```"


def play(agent: CodingAgent, env: CodeEnvironment, replies: list[str]) -> list[float]:
    """The engine's loop, with a model that says ``replies``."""
    agent.reset()
    observation, info = env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    rewards = []
    for reply in replies:
        action = agent.update_from_model(reply)
        observation, reward, done, info = env.step(action.action)
        agent.update_from_env(observation, reward, done, info)
        rewards.append(reward)
        if done:
            break
    return rewards


def contents(agent: CodingAgent) -> list[str]:
    return [message["content"] for message in agent.chat_completions]


@pytest.mark.slow
def test_agent_that_fails_sees_the_failing_test_and_repairs() -> None:
    agent = CodingAgent()
    assert play(agent, CodeEnvironment(TASK, max_turns=3), [WRONG, RIGHT, "never said"]) == [0.0, 1.0]
    feedback = "Your program failed 1 of 1 tests.\n\nInput:\n2 3\nExpected:\n5\nGot:\n6"
    assert contents(agent) == [
        f"{TASK['question']}\n\n{CODE_INSTRUCTION}",
        WRONG,
        f"{feedback}\n\n{REPAIR}",
        RIGHT,
    ]
    assert [message["role"] for message in agent.chat_completions] == ["user", "assistant"] * 2


@pytest.mark.slow
def test_each_response_is_a_step_with_its_thought() -> None:
    agent = CodingAgent()
    play(agent, CodeEnvironment(TASK), [WRONG, RIGHT])
    assert [step.thought for step in agent.trajectory.steps] == ["Multiply?", "Add!"]
    assert [step.action for step in agent.trajectory.steps] == [WRONG, RIGHT]
    assert len(agent.trajectory.steps[0].chat_completions) == 2


@pytest.mark.slow
def test_thoughts_of_earlier_turns_are_removed_only_on_demand() -> None:
    kept, removed = CodingAgent(), CodingAgent(remove_thinking=True)
    for agent in (kept, removed):
        play(agent, CodeEnvironment(TASK), [WRONG, RIGHT])
    assert contents(kept)[1] == WRONG
    assert contents(removed)[1] == WRONG.partition("</think>")[2]
    assert contents(removed)[3] == RIGHT


def test_nothing_is_asked_once_it_is_over() -> None:
    agent = CodingAgent()
    play(agent, CodeEnvironment(TASK, max_turns=1), [WRONG])
    assert len(agent.chat_completions) == 2


def test_messages_are_a_snapshot_and_reset_forgets_them() -> None:
    agent = CodingAgent()
    play(agent, CodeEnvironment(TASK), [WRONG])
    agent.chat_completions[0]["content"] = "changed"
    assert contents(agent)[0].startswith(TASK["question"])
    agent.reset()
    assert (agent.chat_completions, agent.trajectory) == ([], Trajectory())


@pytest.mark.parametrize("observation", [{"problem": "?"}, None, {}])
def test_observation_without_a_text_is_an_error(observation: Any) -> None:
    with pytest.raises(AgentError, match="'question'"):
        CodingAgent().update_from_env(observation, 0.0, False, {})
