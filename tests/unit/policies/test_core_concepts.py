"""The agent that the core-concepts page shows its users runs as it stands there."""

from __future__ import annotations

import copy
from typing import Any

from environments.types import Action, Step, Trajectory
from policies import BaseAgent


# Character for character the class of core_concepts.md.
class MathAgent(BaseAgent):
    def __init__(self, accumulate_thinking=True):
        self.instruction = "Let's think step by step, and put your final answer within \\boxed{}."
        self._trajectory = Trajectory()
        self.messages = []
        self.accumulate_thinking = accumulate_thinking

    def update_from_env(self, observation, reward, done, info, **kwargs):
        if not self.trajectory.steps:
            question = observation["question"]
            formatted_observation = f"{question} {self.instruction}"
        else:
            formatted_observation = "Your previous answer may contain a mistake. Please review it."

        self.messages.append({"role": "user", "content": formatted_observation})

    def update_from_model(self, response, **kwargs):
        self.messages.append({"role": "assistant", "content": response})
        new_step = Step(chat_completions=copy.deepcopy(self.chat_completions))
        self.trajectory.steps.append(new_step)
        return Action(action=response)

    def reset(self):
        self._trajectory = Trajectory()
        self.messages = []

    @property
    def chat_completions(self):
        messages = copy.deepcopy(self.messages)
        if not self.accumulate_thinking:
            for msg in messages[:-1]:
                if msg["role"] == "assistant":
                    _, sep, after = msg["content"].partition("</think>")
                    if sep:
                        msg["content"] = after
        return messages

    @property
    def trajectory(self):
        return self._trajectory

    def get_current_state(self):
        assert self._trajectory.steps
        return self._trajectory.steps[-1]


def play(agent: Any) -> None:
    agent.reset()
    agent.update_from_env({"question": "What is 1+1?"}, 0.0, False, {})
    agent.update_from_model("<think>easy</think>\\boxed{3}")
    agent.update_from_env({}, 0.0, False, {})
    agent.update_from_model("<think>sorry</think>\\boxed{2}")


def test_documented_agent_plays_two_turns() -> None:
    agent = MathAgent()
    play(agent)
    assert [message["role"] for message in agent.chat_completions] == ["user", "assistant"] * 2
    assert (
        agent.chat_completions[2]["content"]
        == "Your previous answer may contain a mistake. Please review it."
    )
    assert [len(step.chat_completions) for step in agent.trajectory.steps] == [2, 4]
    assert agent.get_current_state() is agent.trajectory.steps[-1]


def test_documented_agent_drops_earlier_thoughts_on_request() -> None:
    agent = MathAgent(accumulate_thinking=False)
    play(agent)
    assert [message["content"] for message in agent.chat_completions if message["role"] == "assistant"] == [
        "\\boxed{3}",
        "<think>sorry</think>\\boxed{2}",
    ]


def test_documented_agent_starts_afresh_after_reset() -> None:
    agent = MathAgent()
    play(agent)
    agent.reset()
    assert agent.chat_completions == []
    assert agent.trajectory == Trajectory()


def test_trajectory_becomes_dict_with_keys_of_reference() -> None:
    trajectory = Trajectory(task={"question": "?"}, steps=[Step(action="a", info={"n": [1]})], reward=1.0)
    found = trajectory.to_dict()
    assert (found["task"], found["reward"]) == ({"question": "?"}, 1.0)
    assert (found["steps"][0]["action"], found["steps"][0]["reward"]) == ("a", 0.0)
    found["steps"][0]["info"]["n"].append(2)
    assert trajectory.steps[0].info == {"n": [1]}
