"""Agents that answer a question with their whole response, and answer again in later turns."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

from environments.errors import AgentError
from environments.thoughts import split_thought
from environments.types import Message
from policies.agents.base import HistoryAgent

MATH_INSTRUCTION = "Let's think step by step, and put your final answer within \\boxed{}."
REVIEW = "Your previous answer may contain a mistake. Please review it."
CODE_INSTRUCTION = (
    "Solve the problem in Python. Think first, and put the complete program into one block fenced by "
    "```python and ```."
)
REPAIR = "Find the mistake, and give the complete repaired program in one block fenced by ```python and ```."


class AnsweringAgent(HistoryAgent):
    """Turns each observation into a user message by ``_request``; the action is the whole response.

    Args:
        accumulate_thinking: whether the thoughts of earlier turns stay in the history. Without them every
            turn is a training sequence of its own.
    """

    def __init__(self, accumulate_thinking: bool = True) -> None:
        self.accumulate_thinking = accumulate_thinking
        self.reset()

    @abstractmethod
    def _request(self, observation: Any) -> str:
        """The next user message. Raises ``AgentError`` for an observation that it cannot be made from."""

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not done:
            self.messages.append({"role": "user", "content": self._request(observation)})

    @property
    def chat_completions(self) -> list[Message]:
        messages = super().chat_completions
        if not self.accumulate_thinking:
            for message in messages[:-1]:
                if message["role"] == "assistant":
                    message["content"] = split_thought(message["content"])[1]
        return messages


class MathAgent(AnsweringAgent):
    """Shows ``observation["question"]``, and later asks for a review; the action is the whole response.

    With ``accumulate_thinking=False`` the thoughts of earlier turns are taken out of the history, which
    makes every turn a training sequence of its own.
    """

    def _request(self, observation: Any) -> str:
        if self.trajectory.steps:
            return REVIEW
        return f"{_question(observation, 'MathAgent', 'first observation')} {MATH_INSTRUCTION}"


class CodingAgent(AnsweringAgent):
    """Shows ``observation["question"]``, first the problem, then failed tests; the action is the response.

    With ``remove_thinking=True`` the thoughts of earlier turns are taken out of the history, which makes
    every turn a training sequence of its own.
    """

    def __init__(self, remove_thinking: bool = False) -> None:
        super().__init__(accumulate_thinking=not remove_thinking)

    def _request(self, observation: Any) -> str:
        is_text = isinstance(observation, str)
        text = observation if is_text else _question(observation, "CodingAgent", "observation")
        return f"{text}\n\n{REPAIR if self.trajectory.steps else CODE_INSTRUCTION}"


class PromptAgent(HistoryAgent):
    """Shows ``observation["messages"]`` as they are; the action is the whole response. It answers once."""

    def __init__(self) -> None:
        self.reset()

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not done:
            self.messages += copy.deepcopy(observation["messages"])


def _question(observation: Any, agent: str, noun: str) -> str:
    if not isinstance(observation, dict) or "question" not in observation:
        raise AgentError(
            f"{agent}'s {noun} has no 'question': {str(observation)[:200]}. Name the task's text 'question'."
        )
    return str(observation["question"])
