"""An agent that calls tools until it answers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from environments.bounds import check_choice
from environments.thoughts import split_thought
from environments.tool_environment import FINISH
from environments.tools import NamedToolSource, ToolCall, ToolSource, make_tools
from environments.tools.base import INVALID_TOOL_CALL, openai_schema
from environments.types import Action, Message
from policies.agents.base import HistoryAgent, content_of
from policies.agents.parsers import ToolParser, get_tool_parser

TOOL_SYSTEM_PROMPT = (
    "You solve tasks with the help of tools. Think first, call a tool where it helps, and use its result. "
    "When you know the answer, call no tool and put your final answer within \\boxed{}."
)


class ToolAgent(HistoryAgent):
    """Explains the tools to the model, and parses its calls, unless the server has parsed them.

    The action is a list of calls in OpenAI's shape, ``{"id", "type": "function", "function": {"name",
    "arguments"}}`` with ``arguments`` as JSON text. A response without any call is the answer: one call
    named ``finish`` with the argument ``response``. Malformed calls are passed on as ``invalid_tool_call``
    so that the environment answers them with an error. Ids count up from ``call_0`` within a rollout, but
    calls that a server has parsed keep theirs.

    Tools are names, functions with type hints, Tool classes or MCP servers (``tools``), or named in a
    ``tool_map``, as for ``ToolEnvironment``. The text before ``</think>`` is the thought; calls in it do
    not count.

    Args:
        examples: solved tasks, as messages between the system message and the task: the model learns from
            them how calls and answers are written. An assistant's content holds its calls as text.
        parser_name: how the model writes its calls: "qwen" (also "hermes", and "hermes-brief" with a short
            explanation), "qwen3-coder", "deepseek-v3" (also "r1"), "llama3-json" or "mistral"; "vllm:NAME",
            such as "vllm:kimi_k2", for a parser of vLLM, by which the policy server reads the calls; "openai"
            for an outside server that parses them itself. A parser of your own is derived from
            ``ToolParser`` and given as "module:Class", its class, or an object.
        tools_in: the place where the tools are explained: "system", the parser's text in the system message;
            or "template", the model's chat template. By default the system message, except where a server
            reads the calls.
    """

    def __init__(
        self,
        system_prompt: str = TOOL_SYSTEM_PROMPT,
        parser_name: str | ToolParser | type[ToolParser] = "qwen",
        tools: Sequence[ToolSource] | None = None,
        tool_map: Mapping[str, NamedToolSource] | None = None,
        tools_in: str | None = None,
        examples: Sequence[Message] = (),
    ) -> None:
        self.system_prompt = system_prompt
        self.tools = make_tools(tools, tool_map)
        schemas = [openai_schema(tool.json) for tool in self.tools.values()]
        self.tool_parser = get_tool_parser(parser_name).for_tools(schemas)
        self.needs_tool_calls = not self.tool_parser.reads_text and not self.tool_parser.served_name
        self.served_parser = self.tool_parser.served_name
        tools_in = tools_in or self.tool_parser.tools_in
        check_choice("tools_in", tools_in, ("system", "template"))
        in_system = tools_in == "system"
        self.tools_prompt = self.tool_parser.get_tool_prompt(schemas) if in_system else ""
        self._tool_schemas = None if in_system else schemas or None
        self._examples = copy.deepcopy(list(examples))
        self.reset()

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        return copy.deepcopy(self._tool_schemas)

    def reset(self) -> None:
        super().reset()
        self._num_calls = 0
        parts = [part for part in (self.system_prompt, self.tools_prompt) if part]
        if parts:
            self.messages.append({"role": "system", "content": self.tool_parser.separator.join(parts)})
        self.messages += copy.deepcopy(self._examples)

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.messages += self._format_observation_as_messages(observation)

    def update_from_model(
        self, response: str, tool_calls: Sequence[dict[str, Any]] = (), **kwargs: Any
    ) -> Action:
        thought, answer = split_thought(response)
        # A text that holds its calls stays as it is in the history: so the next prompt extends these tokens.
        message: Message = {"role": "assistant", "content": response}
        if tool_calls:
            calls = [self._checked(call) for call in tool_calls]
            if self.served_parser is None:
                message["tool_calls"] = copy.deepcopy(calls)
        else:
            calls = [self._numbered(call) for call in self.tool_parser.parse(answer)]
            calls = calls or [self._numbered(ToolCall(FINISH, {"response": response}))]
        self.messages.append(message)
        return self._acted(response, thought, calls)

    def _format_observation_as_messages(self, obs: Any) -> list[Message]:
        """Tool outputs as tool messages, any other text as a user message, and none if it is empty.

        As in rLLM v0.1, a subclass may say it in another way.
        """
        if obs is None or obs in ("", {}):
            return []
        if isinstance(obs, dict) and "tool_outputs" in obs:
            return [
                {"role": "tool", "content": output, "tool_call_id": call_id}
                for call_id, output in obs["tool_outputs"].items()
            ]
        return [{"role": "user", "content": content_of(obs, self)}]

    def _checked(self, call: dict[str, Any]) -> dict[str, Any]:
        """A parsed call of the server, which would reject a history with a malformed one."""
        call_id = call.get("id")
        try:
            read = ToolCall.from_openai(call)
        except ValueError as error:
            read = ToolCall(INVALID_TOOL_CALL, {"error": str(error)})
        return self._numbered(read, call_id)

    def _numbered(self, call: ToolCall, call_id: str | None = None) -> dict[str, Any]:
        call_id = call_id or f"call_{self._num_calls}"
        self._num_calls += 1
        return {"id": call_id, **call.to_openai()}
