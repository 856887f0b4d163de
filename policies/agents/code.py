"""An agent that writes a program, and repairs it when it is shown failing tests."""

from __future__ import annotations

import copy
from typing import Any

from environments.errors import AgentError
from environments.types import Action, Message, Step, Trajectory
from policies.agents.base import BaseAgent, split_thought

INSTRUCTION = (
    "Solve the problem in Python. Think first, and put the complete program into one block fenced by "
    "```python and ```."
)
REPAIR = "Find the mistake, and give the complete repaired program in one block fenced by ```python and ```."


class CodingAgent(BaseAgent):
    """Shows ``observation["question"]``, first the problem, then what failed; the action is the response.

    With ``remove_thinking=True`` the thoughts of earlier turns are taken out of the history, which makes
    every turn a training sequence of its own.
    """

    def __init__(self, remove_thinking: bool = False) -> None:
        self.remove_thinking = remove_thinking
        self.reset()

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self.messages: list[Message] = []

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if done:
            return
        wish = REPAIR if self.trajectory.steps else INSTRUCTION
        self.messages.append({"role": "user", "content": f"{_text(observation)}\n\n{wish}"})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        step = Step(
            chat_completions=self.chat_completions,
            thought=split_thought(response)[0],
            action=response,
            model_response=response,
        )
        self.trajectory.steps.append(step)
        return Action(action=response)

    @property
    def chat_completions(self) -> list[Message]:
        messages = copy.deepcopy(self.messages)
        if self.remove_thinking:
            for message in messages[:-1]:
                if message["role"] == "assistant":
                    message["content"] = split_thought(message["content"])[1]
        return messages


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if not isinstance(observation, dict) or "question" not in observation:
        raise AgentError(
            f"CodingAgent's observation has no 'question': {str(observation)[:200]}. "
            "Name the task's text 'question'."
        )
    return str(observation["question"])
