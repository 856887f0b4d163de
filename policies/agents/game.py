"""An agent for games in plain text."""

from __future__ import annotations

import copy
from typing import Any

from environments.thoughts import split_thought
from environments.types import Action
from policies.agents.base import HistoryAgent, text_of


class GameAgent(HistoryAgent):
    """Shows every observation to the model as a user message; the action is the response without its thought.

    An observation is a string, or a dict whose ``"question"`` is shown; an empty one is not shown. A list is
    the parts of a message, as a picture is one.
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
            in_parts = isinstance(observation, list)
            content = copy.deepcopy(observation) if in_parts else text_of(observation, self)
            self.messages.append({"role": "user", "content": content})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        thought, move = split_thought(response)
        return self._acted(response, thought, move)
