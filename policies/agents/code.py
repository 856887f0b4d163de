"""An agent that writes a program, and repairs it when it is shown failing tests."""

from __future__ import annotations

from typing import Any

from environments.errors import AgentError
from policies.agents.answering import AnsweringAgent

INSTRUCTION = (
    "Solve the problem in Python. Think first, and put the complete program into one block fenced by "
    "```python and ```."
)
REPAIR = "Find the mistake, and give the complete repaired program in one block fenced by ```python and ```."


class CodingAgent(AnsweringAgent):
    """Shows ``observation["question"]``, first the problem, then failed tests; the action is the response.

    With ``remove_thinking=True`` the thoughts of earlier turns are taken out of the history, which makes
    every turn a training sequence of its own.
    """

    def __init__(self, remove_thinking: bool = False) -> None:
        super().__init__(accumulate_thinking=not remove_thinking)

    def _request(self, observation: Any) -> str:
        return f"{_text(observation)}\n\n{REPAIR if self.trajectory.steps else INSTRUCTION}"


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if not isinstance(observation, dict) or "question" not in observation:
        raise AgentError(
            f"CodingAgent's observation has no 'question': {str(observation)[:200]}. "
            "Name the task's text 'question'."
        )
    return str(observation["question"])
