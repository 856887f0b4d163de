"""An agent that answers a question, and reviews its answer when it is asked again."""

from __future__ import annotations

from typing import Any

from environments.errors import AgentError
from policies.agents.answering import AnsweringAgent

INSTRUCTION = "Let's think step by step, and put your final answer within \\boxed{}."
REVIEW = "Your previous answer may contain a mistake. Please review it."


class MathAgent(AnsweringAgent):
    """Shows ``observation["question"]``, and later asks for a review; the action is the whole response.

    With ``accumulate_thinking=False`` the thoughts of earlier turns are taken out of the history, which
    makes every turn a training sequence of its own.
    """

    def __init__(self, accumulate_thinking: bool = True) -> None:
        super().__init__(accumulate_thinking)

    def _request(self, observation: Any) -> str:
        return REVIEW if self.trajectory.steps else f"{_question(observation)} {INSTRUCTION}"


def _question(observation: Any) -> str:
    if not isinstance(observation, dict) or "question" not in observation:
        raise AgentError(
            f"MathAgent's first observation has no 'question': {str(observation)[:200]}. "
            "Name the task's text 'question'."
        )
    return str(observation["question"])
