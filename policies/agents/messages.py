"""An agent for environments whose observations are whole conversations."""

from __future__ import annotations

import copy
import json
from typing import Any

from environments.errors import AgentError
from environments.thoughts import split_thought
from environments.types import Action, Message, Step, Trajectory
from policies.agents.base import BaseAgent
from policies.agents.parsers import get_tool_parser


class MessagesAgent(BaseAgent):
    """Shows the model exactly the messages of the observation; the action is an assistant message.

    An observation is ``{"messages": [...], "tools": [...]}``: the conversation to be answered and the
    tools that may be called, both in OpenAI's shape; an empty one is not shown. The tools are explained at
    the end of the system message, in the way of ``parser_name``, and the calls are read from the text.
    Calls get ids that count up from ``call_0``.

    An environment returns the model's messages in a form of its own, without thoughts. The agent puts the
    original responses back, so that the prompt continues the sampled tokens.
    """

    def __init__(self, parser_name: str = "qwen") -> None:
        self._parser = get_tool_parser(parser_name)
        self.reset()

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self._num_calls = 0
        self._has_tools = False
        self._responses: dict[str, str] = {}
        self.messages: list[Message] = []

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if observation is None or observation in ("", {}):
            return
        if not isinstance(observation, dict) or not observation.get("messages"):
            raise AgentError(
                f"MessagesAgent's observation has no 'messages': {str(observation)[:200]}. "
                "Use GameAgent for an environment that speaks in texts."
            )
        tools = observation.get("tools", [])
        self._has_tools = bool(tools)
        messages = [self._as_said(message) for message in copy.deepcopy(observation["messages"])]
        self.messages = self._explained(messages, self._parser.get_tool_prompt(tools))

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        thought, answer = split_thought(response)
        message: Message = {"role": "assistant", "content": answer.strip()}
        if thought:
            message["reasoning_content"] = thought
        calls = self._parser.parse(answer) if self._has_tools else []
        if calls:
            message["tool_calls"] = [self._call(call.name, call.arguments) for call in calls]
        self._responses[_fingerprint(message)] = response
        self.messages.append({"role": "assistant", "content": response})
        step = Step(
            chat_completions=self.chat_completions, thought=thought, action=message, model_response=response
        )
        self.trajectory.steps.append(step)
        return Action(action=message)

    @property
    def chat_completions(self) -> list[Message]:
        return copy.deepcopy(self.messages)

    def _as_said(self, message: Message) -> Message:
        response = self._responses.get(_fingerprint(message)) if message["role"] == "assistant" else None
        return message if response is None else {"role": "assistant", "content": response}

    def _explained(self, messages: list[Message], tool_prompt: str) -> list[Message]:
        if not tool_prompt:
            return messages
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": tool_prompt}, *messages]
        system_prompt = f"{messages[0]['content']}{self._parser.separator}{tool_prompt}"
        return [{"role": "system", "content": system_prompt}, *messages[1:]]

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call_id = f"call_{self._num_calls}"
        self._num_calls += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": call_id, "type": "function", "function": function}


def _fingerprint(message: Message) -> str:
    calls = [call["id"] for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content") or "", message.get("reasoning_content") or "", calls])
