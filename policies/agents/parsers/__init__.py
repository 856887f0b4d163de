"""Tool parsers: how tools are explained to a model, and how its calls are read from its text."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from typing import Any

from environments.errors import ConfigError
from environments.named_class import load_class
from environments.tool_environment import INVALID_TOOL_CALL
from environments.tools import ToolCall
from environments.tools.base import encodable, openai_schema

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

R1_PROMPT = """\
## Tools

You may call the functions below, each described by a JSON schema:
{schemas}

To call functions, end your answer with one block of calls, and write each call exactly like this:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜><function-name>
```json
<args-json-object>
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""

LLAMA3_PROMPT = """\
You have access to the functions below, each described by a JSON schema:
{schemas}

To call a function, answer with nothing but a JSON object of its name and its arguments, separating several \
calls by semicolons:
{{"name": <function-name>, "parameters": <args-json-object>}}"""


_DECODER = json.JSONDecoder(strict=False)
"""Also takes line breaks within a string: models write them where an argument is a program."""


class ToolParser(ABC):
    """One model family's way of calling tools. Your own needs ``parse`` and ``get_tool_prompt``."""

    separator: str = "\n\n"
    """The text between the system prompt and the tool prompt."""
    tools_in: str = "system"
    """The usual place for the tools of its models: the ``"system"`` message or the chat ``"template"``."""
    reads_text: bool = True
    """Whether it parses calls from the text. If not, only a server can parse them."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """The calls in ``text``, in order. A malformed one becomes a call named ``invalid_tool_call``, whose
        argument ``error`` explains the fault to the model."""

    @abstractmethod
    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        """The text that explains tools, given as OpenAI schemas. Empty without tools."""

    def before_calls(self, text: str) -> str:
        """What an answer with calls says before the first of them."""
        return ""

    def around_arguments(self, name: str) -> tuple[str, str]:
        """The texts before and after the JSON of the arguments in an answer that is a call of ``name``."""
        raise ConfigError(f"{type(self).__name__} does not say how a call is written: add around_arguments.")


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3.

    The prompt is the one of Qwen's chat template.
    """

    # A block that is never closed reaches to the end of the text.
    _BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> list[ToolCall]:
        return [_read_hermes(body, bool(end)) for body, end in self._BLOCK.findall(text)]

    def before_calls(self, text: str) -> str:
        return text.partition("<tool_call>")[0]

    def around_arguments(self, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return _explained(HERMES_PROMPT, schemas)


class HermesBriefParser(HermesParser):
    """The same calls, explained in one line a tool: for small models with a short context."""

    separator = " "

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return "\n".join(_brief_line(openai_schema(schema)["function"]) for schema in schemas)


class R1Parser(ToolParser):
    """DeepSeek-R1 and its distills: marked blocks with the name and, fenced as JSON, the arguments."""

    _BLOCK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|\Z)", re.DOTALL)
    _BODY = re.compile(r"\s*function<｜tool▁sep｜>([^\n]+)\n\s*```json\s(.*)```\s*", re.DOTALL)

    def parse(self, text: str) -> list[ToolCall]:
        calls = [self._read(body, bool(end)) for body, end in self._BLOCK.findall(text)]
        if not calls and "<｜tool▁calls▁begin｜>" in text:
            return [_invalid("The block of tool calls has no <｜tool▁call▁begin｜>.")]
        return calls

    def before_calls(self, text: str) -> str:
        return text.partition("<｜tool▁calls▁begin｜>")[0].partition("<｜tool▁call▁begin｜>")[0]

    def around_arguments(self, name: str) -> tuple[str, str]:
        begin = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        return begin, "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return _explained(R1_PROMPT, schemas)

    def _read(self, body: str, closed: bool) -> ToolCall:
        if not closed:
            return _invalid("The tool call has no closing <｜tool▁call▁end｜>.")
        match = self._BODY.fullmatch(body)
        if match is None:
            return _invalid(
                "The tool call has to be function<｜tool▁sep｜>, the name, and in the lines below it the "
                "arguments between ```json and ```."
            )
        try:
            arguments = _DECODER.decode(match[2])
        except (ValueError, RecursionError) as error:
            return _invalid(f"The arguments of the tool call are not valid JSON ({error}).")
        return _checked(match[1].strip(), arguments)


class Llama3JsonParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several separated by ``;``: Llama 3.

    An answer is a call if it starts with ``<|python_tag|>``, or with an object that has both keys: other
    JSON, and braces further on, are plain answers. Text after a call makes it malformed, not plain.
    """

    _TAG = "<|python_tag|>"
    # Broken JSON can only be recognised by how it begins; some models write the type first.
    _HEAD = re.compile(
        r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:.*"(parameters|arguments)"\s*:', re.DOTALL
    )

    def parse(self, text: str) -> list[ToolCall]:
        rest = text.strip()
        tagged = rest.startswith(self._TAG)
        rest = rest.removeprefix(self._TAG).lstrip()
        calls: list[ToolCall] = []
        while rest or (tagged and not calls):
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError) as error:
                if not (calls or tagged or self._HEAD.match(rest)):
                    return []
                return [*calls, _invalid(f"The tool call is not valid JSON ({error}).")]
            if not (calls or tagged or _looks_like_a_call(value)):
                return []
            calls.append(_read_object(value, "parameters"))
            rest = rest[end:].lstrip()
            if rest and not rest.startswith(";"):
                return [
                    *calls[:-1],
                    _invalid("After a tool call there may be nothing but ; and another one."),
                ]
            rest = rest.removeprefix(";").lstrip()
        return calls

    def around_arguments(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return _explained(LLAMA3_PROMPT, schemas)


class OpenAIParser(ToolParser):
    """For servers that parse the calls themselves: the text has none, and the request holds the tools."""

    separator = ""
    tools_in = "template"
    reads_text = False

    def parse(self, text: str) -> list[ToolCall]:
        return []

    def before_calls(self, text: str) -> str:
        return text

    def around_arguments(self, name: str) -> tuple[str, str]:
        raise ConfigError("parser_name='openai' writes no calls: choose your model's parser.")

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        raise ConfigError(
            "parser_name='openai' has no text that explains tools: leave tools_in out, or choose your "
            f"model's parser, one of {', '.join(name for name in PARSERS if name != 'openai')}."
        )


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "hermes-brief": HermesBriefParser,
    "llama3-json": Llama3JsonParser,
    "openai": OpenAIParser,
    "qwen": HermesParser,
    "r1": R1Parser,
}


def get_tool_parser(parser: str | ToolParser | type[ToolParser]) -> ToolParser:
    """The parser of that name, or one of your own: "module:Class", its class, or one that is made already.

    Raises:
        ConfigError: there is none of that name, or it is not derived from ``ToolParser``.
    """
    if isinstance(parser, str):
        if parser not in PARSERS and ":" not in parser:
            raise ConfigError(
                f"parser_name={parser!r} is unknown: use one of {', '.join(PARSERS)}, or your own as "
                '"module:Class".'
            )
        kind = PARSERS.get(parser) or load_class("parser_name", parser, {}, ToolParser)  # type: ignore[type-abstract]
        return kind()
    made = parser() if isinstance(parser, type) else parser
    if not isinstance(made, ToolParser):
        raise ConfigError(
            f"parser_name={parser!r} is no ToolParser of policies.agents.parsers: derive it from that."
        )
    return made


def parser_name_of(chat_template: str) -> str:
    """The parser of a model, by how its chat template writes the calls of its history."""
    if "<｜tool▁call▁begin｜>" in chat_template:
        return "r1"
    if "<tool_call>" not in chat_template and re.search(r"""["']parameters["']\s*:""", chat_template):
        return "llama3-json"
    return "hermes"


def _explained(prompt: str, schemas: list[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return prompt.format(schemas=lines) if schemas else ""


def _brief_line(function: dict[str, Any]) -> str:
    parameters = ", ".join(function.get("parameters", {}).get("properties", {}))
    return f"You can call {function['name']}({parameters}) inside <tool_call></tool_call>."


def _read_hermes(body: str, closed: bool) -> ToolCall:
    if not closed:
        return _invalid("The tool call has no closing </tool_call>.")
    try:
        call = _DECODER.decode(body)
    except (ValueError, RecursionError) as error:
        return _invalid(f"The tool call is not valid JSON ({error}).")
    return _read_object(call, "arguments")


def _looks_like_a_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)


def _read_object(call: Any, key: str) -> ToolCall:
    """Read ``{"name": ..., key: {...}}``. The key that other families use is understood too."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _invalid(f'The tool call has to be {{"name": ..., "{key}": {{...}}}}.')
    return _checked(call["name"], call.get(key, call.get("arguments", call.get("parameters"))))


def _checked(name: str, arguments: Any) -> ToolCall:
    """A call whose arguments are an object, the JSON text of one as OpenAI has it, or null."""
    name = encodable(name)  # with half a character in it, the next request could not be sent
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _DECODER.decode(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _invalid(f"The arguments of {name!r} have to be a JSON object.")
    return ToolCall(name=name, arguments=arguments)


def _invalid(error: str) -> ToolCall:
    return ToolCall(name=INVALID_TOOL_CALL, arguments={"error": error})
