"""Calls as JSON without closing tags: Llama 3's and Mistral's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from environments.tools import ToolCall
from policies.agents.parsers.base import (
    NAME,
    Block,
    BlockParser,
    after_space,
    checked,
    invalid,
    read_calls,
    read_json,
    read_object,
)

ARGUMENTS = ("parameters", "arguments")
"""Names that models have for the arguments of a call."""

LLAMA3_PROMPT = """\
You have access to the functions below, each described by a JSON schema:
{schemas}

To call a function, answer with nothing but a JSON object of its name and its arguments, separating several \
calls by semicolons:
{{"name": <function-name>, "parameters": <args-json-object>}}"""

MISTRAL_PROMPT = """\
You have access to the functions below, each described by a JSON schema:
{schemas}

To call functions, end your answer with a list of calls:
[TOOL_CALLS][{{"name": <function-name>, "arguments": <args-json-object>}}]"""


class Llama3JsonParser(BlockParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several separated by ``;``: Llama 3.

    Calls begin after ``<|python_tag|>``, or with the answer, if that is an object that has both keys: other
    JSON, and braces further on, are plain answers. Text after a call makes it malformed, not plain.
    """

    prompt = LLAMA3_PROMPT
    _TAG = "<|python_tag|>"
    openings = (_TAG,)
    opens_answer = "{"
    is_closed = False
    beginning = re.compile(rf"(?:{re.escape(_TAG)})?\s*{NAME}")
    # Broken JSON can only be recognised by how it begins; some models write the type first.
    _HEAD = re.compile(
        r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:.*"(parameters|arguments)"\s*:', re.DOTALL
    )

    def blocks(self, text: str) -> Iterator[Block]:
        start = text.find(self._TAG)
        position = after_space(text, start + len(self._TAG) if start >= 0 else 0)
        if start < 0:
            start = position
            if not self._begins_a_call(text, position):
                return
        while True:
            try:
                value, position = read_json(text, position)
            except ValueError as error:
                yield Block(start, len(text), [invalid(f"The tool call is not valid JSON ({error}).")])
                return
            position = after_space(text, position)
            end = text[position : position + 1]
            if end not in ("", ";"):
                fault = invalid("After a tool call there may be nothing but ; and another one.")
                yield Block(start, len(text), [fault])
                return
            position = after_space(text, position + len(end))
            yield Block(start, position, [read_object(value, "parameters")])
            if position == len(text):
                return
            start = position

    def around_arguments(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    def _begins_a_call(self, text: str, position: int) -> bool:
        try:
            value, _ = read_json(text, position)
        except ValueError:
            return self._HEAD.match(text, position) is not None
        return isinstance(value, dict) and "name" in value and not value.keys().isdisjoint(ARGUMENTS)


class MistralParser(BlockParser):
    """``[TOOL_CALLS]``, and a list of ``{"name": ..., "arguments": {...}}``: Mistral.

    Its newer models write ``[TOOL_CALLS]name[ARGS]{...}`` for each call.
    """

    prompt = MISTRAL_PROMPT
    _TAG = "[TOOL_CALLS]"
    _NAME = re.compile(r"\s*([^\s\[{]+)\s*+(?:\[CALL_ID\][^\s\[{]*)?\s*+(?:\[ARGS\])?\s*+(?=\{)")
    openings = (_TAG,)
    beginning = re.compile(rf"{re.escape(_TAG)}(?:{_NAME.pattern}|\s*\[\s*{NAME})")

    def blocks(self, text: str) -> Iterator[Block]:
        start = text.find(self._TAG)
        while start >= 0:
            calls: list[ToolCall] = []
            position = start + len(self._TAG)
            try:
                for call, end in self._read(text, position):
                    calls.append(call)
                    position = end
            except ValueError as error:
                calls.append(invalid(f"The tool call is not valid JSON ({error})."))
            yield Block(start, position, calls)
            start = text.find(self._TAG, position)

    def around_arguments(self, name: str) -> tuple[str, str]:
        return f'{self._TAG}[{{"name": {json.dumps(name)}, "arguments": ', "}]"

    def _read(self, text: str, position: int) -> Iterator[tuple[ToolCall, int]]:
        name = self._NAME.match(text, position)
        if name is None:
            yield from read_calls(text, position)
        else:
            arguments, position = read_json(text, name.end())
            yield checked(name[1], arguments), position
