"""Tool parsers: how tools are explained to a model, and how its calls are read from its text."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from environments.errors import ConfigError
from environments.tool_environment import INVALID_TOOL_CALL
from environments.tools import ToolCall

HERMES_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ToolParser(Protocol):
    """One model family's way of calling tools."""

    separator: str
    """What stands between the system prompt and the tool prompt."""

    def parse(self, text: str) -> list[ToolCall]:
        """The calls in ``text``, in order. A malformed one is a call named ``invalid_tool_call``, whose
        argument ``error`` says what is wrong with it: the model shall hear of it."""
        ...

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        """The text that explains tools, given as OpenAI schemas. Empty without tools."""
        ...


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3.

    The prompt is the one of Qwen's chat template.
    """

    separator = "\n\n"
    # A block that is never closed reaches to the end of the text.
    _BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> list[ToolCall]:
        return [_read_call(body, bool(end)) for body, end in self._BLOCK.findall(text)]

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        if not schemas:
            return ""
        return HERMES_PROMPT.format(
            schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        )


class HermesBriefParser(HermesParser):
    """The same calls, explained in one line a tool: for small models whose context is dear."""

    separator = " "

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return "\n".join(_brief_line(schema["function"]) for schema in schemas)


_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "hermes-brief": HermesBriefParser,
    "qwen": HermesParser,
}


def get_tool_parser(name: str) -> ToolParser:
    """The parser called ``name``; ``ConfigError`` if there is none."""
    if name not in _PARSERS:
        raise ConfigError(f"parser_name={name!r} is unknown: use one of {', '.join(_PARSERS)}.")
    return _PARSERS[name]()


def _brief_line(function: dict[str, Any]) -> str:
    parameters = ", ".join(function.get("parameters", {}).get("properties", {}))
    return f"You can call {function['name']}({parameters}) inside <tool_call></tool_call>."


def _read_call(body: str, closed: bool) -> ToolCall:
    if not closed:
        return _invalid("The tool call has no closing </tool_call>.")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _invalid(f"The tool call is not valid JSON ({error}).")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _invalid('The tool call has to be {"name": ..., "arguments": {...}}.')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return _invalid(f"The arguments of {call['name']} have to be a JSON object.")
    return ToolCall(name=call["name"], arguments=arguments)


def _invalid(error: str) -> ToolCall:
    return ToolCall(name=INVALID_TOOL_CALL, arguments={"error": error})
