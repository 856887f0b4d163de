"""The contract between an agent and the engine that plays it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from environments.errors import AgentError
from environments.messages import is_part
from environments.thoughts import split_thought
from environments.types import Action, Message, Step, Trajectory


class BaseAgent(ABC):
    """Keeps the message history of one rollout and turns the model's text into actions.

    The engine calls, in this order: ``reset``; ``update_from_env`` with the first observation (reward 0,
    not done); then per turn it samples an answer to ``chat_completions``, calls ``update_from_model`` with
    it, and ``update_from_env`` with the answer of the environment, also after the last turn. The arguments
    of ``update_from_env`` are given by their names, as rLLM v0.1 did; the response is given by position.

    For all sampled tokens of a rollout to be trained as one sequence, an assistant message has to hold
    the response as it was given. An agent may rewrite its history; training then starts a new sequence.
    """

    needs_tool_calls: bool = False
    """True where it takes tool calls only from a server that parses them, and none from the text."""
    served_parser: str | None = None
    """Name of the parser by which the policy server is to read its calls, such as ``vllm:hermes``."""

    policies: tuple[str, ...] = ("",)
    """Names of the policies that it samples. Where there are several, ``sampling`` names the one that plays
    the next turn, ``{"policy": "solver"}``, and each has seats of its own: ``SeatsAgent`` does both."""

    wants_completion: bool = False
    """True where ``update_from_model`` takes the ``Completion`` too, by the name ``completion``: for its
    tokens, their log-probabilities, or the reason of its end."""

    _trajectory: Trajectory

    @property
    def chat_completions(self) -> list[Message]:
        """The messages that the model sees next, as a copy that later turns do not change."""
        return []

    @property
    def trajectory(self) -> Trajectory:
        """The steps since ``reset``: always the same object, so that steps can be appended to it."""
        try:
            return self._trajectory
        except AttributeError:
            name = type(self).__name__
            raise AgentError(
                f"{name} has no trajectory: write self._trajectory = Trajectory() in {name}.reset and "
                f"{name}.__init__, or override the property."
            ) from None

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """OpenAI schemas of the tools that the chat template or the server has to show the model.

        ``None`` where there are none, or where the agent's own messages explain them.
        """
        return None

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Fields of ``SamplingParams`` that the next answer has instead of the rollout's, such as
        ``{"stop": ("</code>",), "max_tokens": 200}``. ``max_tokens`` cannot exceed the rollout's limits.
        """
        return {}

    @abstractmethod
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        """Take in the answer of the environment to the last action."""

    @abstractmethod
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Append exactly one ``Step`` to ``trajectory.steps`` and return the action.

        ``kwargs`` has ``tool_calls``, a list in the OpenAI shape, where the server has parsed calls from
        the output; ``response`` is the rest of the text then, and may be empty. By a ``served_parser`` it is
        all of the text.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: a new rollout begins."""

    def get_current_state(self) -> Step | None:
        """The last step, or ``None`` before the first."""
        steps = self.trajectory.steps
        return steps[-1] if steps else None


class HistoryAgent(BaseAgent):
    """An agent whose ``messages`` are the whole conversation, and all that the model sees."""

    messages: list[Message]

    @property
    def chat_completions(self) -> list[Message]:
        return copy.deepcopy(self.messages)

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self.messages = []

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Take the whole response as the action."""
        self.messages.append({"role": "assistant", "content": response})
        return self._acted(response, split_thought(response)[0], response)

    def _acted(self, response: str, thought: str, action: Any) -> Action:
        """Append the step that ends with ``response``, which is in the history, and return its action."""
        history = self.chat_completions
        step = Step(chat_completions=history, thought=thought, action=action, model_response=response)
        self.trajectory.steps.append(step)
        return Action(action=action)


def content_of(observation: Any, agent: BaseAgent) -> str | list[Any]:
    """Return what of an observation the model reads: a dict's ``"question"``, the parts of a message, or the
    text of another value.

    Raises:
        AgentError: a dict has no question. All of it is not shown, since it may hold the ground truth. Or it
            is for one seat of several: in one conversation each would see what the others do.
    """
    if isinstance(observation, list) and any(map(is_part, observation)):
        return copy.deepcopy(observation)
    if not isinstance(observation, dict):
        return str(observation)
    if observation.keys() == {"seat", "question"}:
        raise AgentError(
            f"{type(agent).__name__} plays one seat, and the observation is for the seat "
            f"{observation['seat']!r} of a game of several: play them all by SeatsAgent."
        )
    if "question" not in observation:
        keys = ", ".join(map(str, observation))
        raise AgentError(
            f"{type(agent).__name__}'s observation has no 'question' (its keys: {keys}). "
            "Name the task's text 'question'."
        )
    return str(observation["question"])
