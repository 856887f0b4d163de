"""An agent for games in plain text."""

from __future__ import annotations

from typing import Any

from environments.thoughts import split_thought
from environments.types import Action
from policies.agents.base import HistoryAgent, content_of


class GameAgent(HistoryAgent):
    """Shows every observation to the model as a user message; the action is the response without its thought.

    An observation is a string, a dict whose ``"question"`` is shown, or the parts of a message, of which a
    picture is one; an empty one is not shown.
    """

    def __init__(self, system_prompt: str = "") -> None:
        self._system_prompt = system_prompt
        self.reset()

    def reset(self) -> None:
        super().reset()
        if self._system_prompt:
            self.messages.append({"role": "system", "content": self._system_prompt})

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if observation is not None and observation not in ("", {}):
            self.messages.append({"role": "user", "content": content_of(observation, self)})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        thought, move = split_thought(response)
        return self._acted(response, thought, move)
