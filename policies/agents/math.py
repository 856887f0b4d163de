"""An agent that answers a question, and reviews its answer when it is asked again."""

from __future__ import annotations

import copy
from typing import Any

from environments.errors import AgentError
from environments.types import Action, Message, Step, Trajectory
from policies.agents.base import BaseAgent, split_thought

INSTRUCTION = "Let's think step by step, and put your final answer within \\boxed{}."
REVIEW = "Your previous answer may contain a mistake. Please review it."


class MathAgent(BaseAgent):
    """Asks ``observation["question"]``, later for a review; the action is the whole response.

    With ``accumulate_thinking=False`` the thoughts of earlier turns are taken out of the history, which
    makes every turn a training sequence of its own.
    """

    def __init__(self, accumulate_thinking: bool = True) -> None:
        self.accumulate_thinking = accumulate_thinking
        self.reset()

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self.messages: list[Message] = []

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if done:
            return
        text = REVIEW if self.trajectory.steps else f"{_question(observation)} {INSTRUCTION}"
        self.messages.append({"role": "user", "content": text})

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


def _question(observation: Any) -> str:
    if not isinstance(observation, dict) or "question" not in observation:
        raise AgentError(
            f"MathAgent's first observation has no 'question': {str(observation)[:200]}. "
            "Name the task's text 'question'."
        )
    return str(observation["question"])
