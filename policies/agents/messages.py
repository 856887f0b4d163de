"""An agent for environments whose observations are whole conversations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from environments.errors import AgentError
from environments.thoughts import split_thought
from environments.types import Action, Message
from policies.agents.base import HistoryAgent
from policies.agents.parsers import get_tool_parser


class MessagesAgent(HistoryAgent):
    """Shows the model exactly the messages of the observation; the action is an assistant message.

    An observation is ``{"messages": [...], "tools": [...]}``: the conversation to be answered and the
    tools that may be called, both in OpenAI's shape; an empty one is not shown. The tools are explained at
    the end of the system message, in the way of ``parser_name``, and the calls are read from the text; by
    one of vLLM's parsers, the chat template explains them, and the policy server reads. Calls get ids that
    count up from ``call_0``.

    An environment returns the model's messages in a form of its own, without thoughts. The agent puts the
    original responses back, so that the prompt continues the sampled tokens. Where two of them differ by
    white space or thoughts alone, the later message is the later response.
    """

    def __init__(self, parser_name: str = "qwen") -> None:
        self._parser = get_tool_parser(parser_name)
        self.served_parser = self._parser.served_name
        self.needs_tool_calls = not self._parser.reads_text and not self.served_parser
        self.reset()

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        return copy.deepcopy(self._tools) if self._tools and self._parser.tools_in == "template" else None

    def reset(self) -> None:
        super().reset()
        self._num_calls = 0
        self._tools: list[dict[str, Any]] = []
        self._answers: list[tuple[Message, Message]] = []
        """Each action, and how it stands in the prompt."""

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
        self._tools = copy.deepcopy(list(observation.get("tools") or ()))
        in_system = self._parser.tools_in == "system"
        tool_prompt = self._parser.get_tool_prompt(self._tools) if in_system else ""
        self.messages = self._explained(self._with_responses(observation["messages"]), tool_prompt)

    def update_from_model(
        self, response: str, tool_calls: Sequence[dict[str, Any]] = (), **kwargs: Any
    ) -> Action:
        thought, answer = split_thought(response)
        # What a thought is followed by is mostly a blank line, of which no environment wants to know.
        message: Message = {"role": "assistant", "content": answer.lstrip() if thought else answer}
        if thought:
            message["reasoning_content"] = thought
        shown: Message = {"role": "assistant", "content": response}
        if tool_calls:
            message["tool_calls"] = [self._numbered(call) for call in tool_calls]
            if self.served_parser is None:
                shown["tool_calls"] = copy.deepcopy(message["tool_calls"])
        elif self._tools and (calls := self._parser.for_tools(self._tools).parse(answer)):
            message["tool_calls"] = [self._numbered(call.to_openai()) for call in calls]
        self._answers.append((copy.deepcopy(message), shown))
        self.messages.append(shown)
        return self._acted(response, thought, message)

    def _with_responses(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the original responses: found by their exact texts where the environment keeps
        these, else but for white space."""
        exact, alike = self._responses(messages, _exactly), self._responses(messages, _but_for_space)
        found = exact if exact.count(None) == alike.count(None) else alike
        return copy.deepcopy([response or message for message, response in zip(messages, found, strict=True)])

    def _responses(self, messages: Sequence[Message], key: Callable[[Message], Any]) -> list[Message | None]:
        """The response that each message is, matched from the last one on: the first may not be shown."""
        answers = [(key(action), shown) for action, shown in self._answers]
        found: list[Message | None] = []
        for message in reversed(messages):
            wanted = key(message) if message["role"] == "assistant" else None
            index = next((i for i in reversed(range(len(answers))) if answers[i][0] == wanted), None)
            found.append(None if index is None else answers.pop(index)[1])
        return found[::-1]

    def _explained(self, messages: list[Message], tool_prompt: str) -> list[Message]:
        if not tool_prompt:
            return messages
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": tool_prompt}, *messages]
        content, more = messages[0]["content"], f"{self._parser.separator}{tool_prompt}"
        content = [*content, {"type": "text", "text": more}] if isinstance(content, list) else content + more
        return [{"role": "system", "content": content}, *messages[1:]]

    def _numbered(self, call: dict[str, Any]) -> dict[str, Any]:
        call_id = f"call_{self._num_calls}"
        self._num_calls += 1
        return {**copy.deepcopy(call), "id": call.get("id") or call_id}


def _exactly(message: Message) -> tuple[str, str, list[str]]:
    calls = [call["id"] for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return content, message.get("reasoning_content") or "", calls


def _but_for_space(message: Message) -> tuple[str, str, list[str]]:
    content, thought, calls = _exactly(message)
    return content.strip(), thought.strip(), calls
