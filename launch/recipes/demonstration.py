"""Demonstrations are played, not written: the agent and environment in training say the rest."""

from __future__ import annotations

from collections.abc import Sequence

from environments.base import BaseEnv
from environments.types import Message
from policies.agents.base import BaseAgent


def demonstrate(agent: BaseAgent, env: BaseEnv, replies: Sequence[str]) -> list[Message]:
    """The conversation in which the model says ``replies``, up to its last one or the end of the episode."""
    observation, info = env.reset()
    agent.reset()
    agent.update_from_env(observation, 0.0, False, info)
    conversation: list[Message] = []
    for reply in replies:
        action = agent.update_from_model(reply)
        conversation = list(agent.chat_completions)  # ends with this reply, before the environment answers
        observation, reward, done, info = env.step(action.action)
        agent.update_from_env(observation, reward, done, info)
        if done:
            break
    env.close()
    return conversation
