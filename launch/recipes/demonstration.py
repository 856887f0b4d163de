"""Demonstrations for the recipes: they are played with the agent and environment in training, not written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from environments.base import BaseEnv
from environments.types import Message
from policies.agents.base import BaseAgent

Script = TypeVar("Script")
"""Material from which a recipe plays a demonstration."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from, which ends with what the assistant says, and the reward that it got."""

    messages: list[Message]
    reward: float


@dataclass(frozen=True)
class Demonstrations(Sequence[list[Message]], Generic[Script]):
    """Conversations for a workload, each played when somebody reads it: most commands read none."""

    play: Callable[[Script], Demonstration]
    scripts: Sequence[Script]

    def __len__(self) -> int:
        return len(self.scripts)

    @overload
    def __getitem__(self, index: int) -> list[Message]: ...
    @overload
    def __getitem__(self, index: slice) -> Demonstrations[Script]: ...
    def __getitem__(self, index: int | slice) -> list[Message] | Demonstrations[Script]:
        if isinstance(index, slice):
            return Demonstrations(self.play, self.scripts[index])
        return self.play(self.scripts[index]).messages

    def with_rewards(self) -> Iterator[Demonstration]:
        """Play all of them."""
        return map(self.play, self.scripts)


def written_call(tool: str, **arguments: str) -> str:
    """A call of ``tool`` as the agents of the recipes write it."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def demonstrate(agent: BaseAgent, env: BaseEnv, replies: Sequence[str]) -> Demonstration:
    """Play ``replies`` as the model's, up to the last of them or the end of the episode."""
    messages: list[Message] = []
    total = 0.0
    try:
        observation, info = env.reset()
        agent.reset()
        agent.update_from_env(observation=observation, reward=0.0, done=False, info=info)
        for reply in replies:
            action = agent.update_from_model(reply)
            messages = list(agent.chat_completions)  # ends with this reply, before the environment answers
            observation, reward, done, info = env.step(action.action)
            total += reward
            agent.update_from_env(observation=observation, reward=reward, done=done, info=info)
            if done:
                break
    finally:
        env.close()
    return Demonstration(messages, total)
