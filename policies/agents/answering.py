"""The base of agents that answer a question, and answer again when they are asked to."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

from environments.thoughts import split_thought
from environments.types import Action, Message, Step, Trajectory
from policies.agents.base import BaseAgent


class AnsweringAgent(BaseAgent):
    """Turns each observation into a user message by ``_request``; the action is the whole response.

    Args:
        accumulate_thinking: whether the thoughts of earlier turns stay in the history. Without them every
            turn is a training sequence of its own.
    """

    def __init__(self, accumulate_thinking: bool) -> None:
        self.accumulate_thinking = accumulate_thinking
        self.reset()

    @abstractmethod
    def _request(self, observation: Any) -> str:
        """The next user message. Raises ``AgentError`` for an observation that it cannot be made from."""

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self.messages: list[Message] = []

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not done:
            self.messages.append({"role": "user", "content": self._request(observation)})

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
        if not self.accumulate_thinking:
            for message in messages[:-1]:
                if message["role"] == "assistant":
                    message["content"] = split_thought(message["content"])[1]
        return messages
