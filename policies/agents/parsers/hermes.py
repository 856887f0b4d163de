"""Calls within ``<tool_call>``: as JSON (Hermes, Qwen 2.5, Qwen 3), and as XML (Qwen3-Coder)."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from environments.tools import ToolCall
from environments.tools.base import MODEL_JSON, encodable, openai_schema
from policies.agents.parsers.base import (
    NAME,
    Block,
    BlockParser,
    Json,
    after_space,
    invalid,
    read_calls,
    unread,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"

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

QWEN3_CODER_PROMPT = """\
# Tools

You have access to the functions below, each described by a JSON schema:
<tools>
{schemas}
</tools>

To call functions, write each call exactly like this, with the values of its parameters as they are:
<tool_call>
<function=function_name>
<parameter=parameter_name>
value
</parameter>
</function>
</tool_call>"""


class TaggedParser(BlockParser):
    """Calls within ``<tool_call>`` and ``</tool_call>``, of which one may hold several.

    A form may have more ``openings``: the beginning of a call that stands without the tags, and the closing
    tag, which models write even so. Such a call is a block of its own, that ends with ``call_end``.
    """

    openings: tuple[str, ...] = (OPEN,)
    language: str
    starts: tuple[str, ...]
    """Beginnings that another call within the same tags may have."""
    call_end: str = CLOSE

    @abstractmethod
    def read(self, text: str, position: int) -> Iterator[tuple[ToolCall, int]]:
        """Read at least one call, each with the position after it.

        Raises:
            ValueError: what follows is no call. The calls before it have been yielded.
        """

    def blocks(self, text: str) -> Iterator[Block]:
        position = 0
        while (start := self._next_opening(text, position)) < len(text):
            if text.startswith(CLOSE, start):
                block = Block(start, start + len(CLOSE), [])
            else:
                block = self._block(text, start) if text.startswith(OPEN, start) else self._bare(text, start)
            yield block
            position = block.end

    def _next_opening(self, text: str, position: int) -> int:
        found = (text.find(mark, position) for mark in self.openings)
        return min((start for start in found if start >= 0), default=len(text))

    def _bare(self, text: str, start: int) -> Block:
        try:
            call, end = next(self.read(text, start))
        except ValueError as error:
            fault = f"The tool call is not valid {self.language} ({error})."
            call, end = unread(text, start, self.call_end, fault)
        return Block(start, end, [call])

    def _block(self, text: str, start: int) -> Block:
        calls: list[ToolCall] = []
        position = start + len(OPEN)
        try:
            while True:
                for call, end in self.read(text, position):
                    calls.append(call)
                    position = end
                position = after_space(text, position)
                if text.startswith(CLOSE, position):
                    return Block(start, position + len(CLOSE), calls)
                if not text.startswith(self.starts, position):
                    break
        except ValueError as error:
            fault = f"The tool call is not valid {self.language} ({error})."
            call, end = unread(text, position, CLOSE, fault)
            return Block(start, end, [*calls, call])
        fault = f"The tool call is not valid {self.language} (something else follows it)."
        call, _ = unread(text, position, CLOSE, fault)
        return Block(start, position, [*calls[:-1], call])


class HermesParser(TaggedParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3.

    Several calls may stand within the same tags, one after another or in a list. The prompt is the one of
    Qwen's chat template.
    """

    prompt = HERMES_PROMPT
    language = "JSON"
    beginning = re.compile(rf"{OPEN}\s*{NAME}")
    starts = ("{", "[")

    def read(self, text: str, position: int) -> Iterator[tuple[ToolCall, int]]:
        return read_calls(text, position)

    def around_arguments(self, name: str) -> tuple[str, str]:
        return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{CLOSE}"


class HermesBriefParser(HermesParser):
    """The same calls, explained in one line a tool: for small models with a short context."""

    separator = " "

    def get_tool_prompt(self, schemas: list[Json]) -> str:
        return "\n".join(_brief_line(openai_schema(schema)["function"]) for schema in schemas)


class Qwen3CoderParser(TaggedParser):
    """``<function=name>`` with ``<parameter=name>`` in it, whose values stand there as they are.

    Only the schema of a tool tells whether ``3`` is a number or a text: without it all values are texts. A
    value ends where ``</parameter>`` is followed by another parameter or by the function's end. The model
    now and then leaves ``<tool_call>`` out.
    """

    prompt = QWEN3_CODER_PROMPT
    language = "XML"
    starts = ("<function=",)
    openings = (OPEN, "<function=", CLOSE)
    call_end = "</function>"
    arguments_style = "qwen_xml"
    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
    _PARAMETER = re.compile(
        r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
    )

    def __init__(self, schemas: Sequence[Json] = ()) -> None:
        functions = [openai_schema(schema)["function"] for schema in schemas]
        self._parameters = {each["name"]: each.get("parameters") for each in functions}

    def for_tools(self, schemas: Sequence[Json]) -> Qwen3CoderParser:
        return Qwen3CoderParser(schemas)

    def read(self, text: str, position: int) -> Iterator[tuple[ToolCall, int]]:
        function = self._FUNCTION.match(text, position)
        if function is None:
            raise ValueError("it has to begin with <function=name>")
        name, position = encodable(function[1].strip()), function.end()
        parameters = self._parameters.get(name)
        arguments: dict[str, Any] = {}
        faults = []
        while (parameter := self._PARAMETER.match(text, position)) is not None:
            key, position = parameter[1].strip(), parameter.end()
            types = _types_of(key, parameters if isinstance(parameters, dict) else {})
            try:
                arguments[key] = _value(parameter[2], types)
            except (ValueError, RecursionError):
                wanted = " or ".join(sorted(types))
                faults.append(f"The parameter {key!r} of {name!r} has to be {wanted}, written as JSON.")
        if not text.startswith("</function>", position):
            raise ValueError("after a parameter only another one or </function> may follow")
        call = invalid(" ".join(faults)) if faults else ToolCall(name, arguments)
        yield call, position + len("</function>")

    def around_arguments(self, name: str) -> tuple[str, str]:
        return f"{OPEN}\n<function={name}>\n", f"\n</function>\n{CLOSE}"


def _brief_line(function: Json) -> str:
    parameters = ", ".join(function.get("parameters", {}).get("properties", {}))
    return f"You can call {function['name']}({parameters}) inside {OPEN}{CLOSE}."


_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _types_of(key: str, parameters: Json) -> set[str]:
    """The JSON types that a parameter may have; none where its schema does not say."""
    definitions = parameters.get("$defs") or {}
    types: set[str] = set()
    waiting = [(parameters.get("properties") or {}).get(key)]
    seen: set[str] = set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        kinds = schema.get("type")
        types |= {each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str)}
        types |= {_TYPE_NAMES.get(type(value), "object") for value in schema.get("enum") or ()}
        name = str(schema.get("$ref")).rpartition("/")[2]
        if name not in seen:
            seen.add(name)
            waiting.append(definitions.get(name))
        waiting += [each for form in ("anyOf", "oneOf", "allOf") for each in schema.get(form) or ()]
    return types


def _value(text: str, types: set[str]) -> Any:
    """The value that a parameter's text stands for. Raises ``ValueError``."""
    plain = text.strip()
    if plain == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and plain.lower() in ("true", "false"):  # some models write Python's
        return plain.lower() == "true"
    return MODEL_JSON.decode(plain)
