"""The contract of tool parsers, that of a server, and how the JSON of calls is read."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from environments.errors import ConfigError
from environments.tools import ToolCall
from environments.tools.base import INVALID_TOOL_CALL, MODEL_JSON, encodable

Json = dict[str, Any]
VLLM = "vllm:"
"""Begins the name of a parser of vLLM, such as ``vllm:hermes``."""
_SPACE = re.compile(r"\s*")
NAME = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The JSON of a call up to its arguments, as a pattern whose group is the name."""


class ToolParser(ABC):
    """A model family's way of calling tools. Your own needs ``parse`` and ``get_tool_prompt``."""

    separator: str = "\n\n"
    """The text between the system prompt and the tool prompt."""
    tools_in: str = "system"
    """The usual place for the tools of its models: the ``"system"`` message or the chat ``"template"``."""
    reads_text: bool = True
    """True where it parses calls from the text. If not, only a server can parse them."""
    served_name: str | None = None
    """Name of the parser by which the policy server reads the calls from a text that goes on holding them."""
    arguments_style: str = "json"
    """Form of arguments in an answer, by xgrammar's name for it."""
    openings: tuple[str, ...] = ("",)
    """The marks with which calls begin. By the empty one, anything may be a call until the answer ends."""
    opens_answer: str = ""
    """Text that begins a call too, where an answer begins with it."""
    is_closed: bool = True
    """True where a block has an end of its own, so that no text after it changes what it says."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """The calls in ``text``, in order. A malformed one becomes a call named ``invalid_tool_call``, whose
        argument ``error`` explains the fault to the model."""

    @abstractmethod
    def get_tool_prompt(self, schemas: list[Json]) -> str:
        """The text that explains tools, given as OpenAI schemas. Empty without tools."""

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls. A malformed one is none: it stays in the text."""
        calls = self.parse(text)
        good = valid(calls)
        return "" if good and len(good) == len(calls) else text, good

    def blocks(self, text: str) -> Iterator[Block]:
        """The blocks of calls in ``text``, in order; none where the form shows no blocks."""
        return iter(())

    def for_tools(self, schemas: Sequence[Json]) -> ToolParser:
        """The parser of a conversation with these tools, for a form that shows no types of arguments."""
        return self

    def begun(self, text: str) -> tuple[str, int] | None:
        """The name of the call that ``text`` begins with, and the position where the JSON object of its
        arguments begins; ``None`` as long as they are not there, or where the form does not show them."""
        return None

    def around_arguments(self, name: str) -> tuple[str, str]:
        """The texts before and after the arguments in an answer that is a call of ``name``."""
        raise ConfigError(f"{type(self).__name__} does not say how a call is written: add around_arguments.")


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a text, from ``start`` to ``end``, that the model has written as calls."""

    start: int
    end: int
    calls: list[ToolCall]


class BlockParser(ToolParser):
    """Calls that stand in blocks among other text."""

    beginning: re.Pattern[str] | None = None
    """A block up to the object of its first call's arguments; one group is the name, as JSON or plain."""
    prompt: str
    """The text that explains tools, with ``{schemas}`` in the place of theirs, one a line."""

    @abstractmethod
    def blocks(self, text: str) -> Iterator[Block]:
        """The blocks of ``text``, in order."""

    def begun(self, text: str) -> tuple[str, int] | None:
        match = None if self.beginning is None else self.beginning.match(text)
        if match is None:
            return None
        name = next(group for group in match.groups() if group)
        try:
            return encodable(MODEL_JSON.decode(name) if name.startswith('"') else name.strip()), match.end()
        except ValueError:
            return None

    def get_tool_prompt(self, schemas: list[Json]) -> str:
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return self.prompt.format(schemas=lines) if schemas else ""

    def parse(self, text: str) -> list[ToolCall]:
        return [call for block in self.blocks(text) for call in block.calls]

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        kept, calls, position = [], [], 0
        for block in self.blocks(text):
            good = valid(block.calls)
            calls += good
            kept.append(text[position : block.start if len(good) == len(block.calls) else block.end])
            position = block.end
        return "".join([*kept, text[position:]]), calls


def valid(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """The calls without those that could not be read."""
    return [call for call in calls if call.name != INVALID_TOOL_CALL]


def invalid(error: str) -> ToolCall:
    """A call that could not be read; ``error`` is a sentence for the model."""
    return ToolCall(name=INVALID_TOOL_CALL, arguments={"error": error})


def unread(text: str, position: int, close: str, fault: str) -> tuple[ToolCall, int]:
    """A call with a fault at ``position``, and the position behind the tag that closes it, where one does."""
    end = text.find(close, position)
    if end < 0:
        return invalid(f"The tool call has no closing {close}."), len(text)
    return invalid(fault), end + len(close)


def after_space(text: str, position: int) -> int:
    """The next position that holds no white space."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at ``position``, and the position after it. Raises ``ValueError``."""
    start = after_space(text, position)
    try:
        return MODEL_JSON.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from error


def read_calls(text: str, position: int) -> Iterator[tuple[ToolCall, int]]:
    """The calls of one JSON object or of a list of them, each with the position after it.

    Raises:
        ValueError: what follows is no JSON. The calls before it have been yielded.
    """
    position = after_space(text, position)
    if not text.startswith("[", position):
        value, position = read_json(text, position)
        yield read_object(value, "arguments"), position
        return
    mark = "["
    while mark in ("[", ","):
        value, position = read_json(text, position + 1)
        position = after_space(text, position)
        mark = text[position : position + 1]
        yield read_object(value, "arguments"), position + (mark == "]")
    if mark != "]":
        raise ValueError("Expecting ',' or ']' after a call")


def read_object(call: Any, key: str) -> ToolCall:
    """Read ``{"name": ..., key: {...}}``. The key that other families use is understood too."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return invalid(f'The tool call has to be {{"name": ..., "{key}": {{...}}}}.')
    arguments = call.get(key, call.get("arguments", call.get("parameters")))
    return checked(call["name"], arguments)


def call_for_template(call: Json) -> Json:
    """A call of OpenAI's with an object for its arguments. Raises ``ValueError`` if they are none."""
    read = ToolCall.from_openai(call)
    return {**call, "function": {"name": read.name, "arguments": read.arguments}}


def checked(name: str, arguments: Any) -> ToolCall:
    """A call whose arguments are an object, the JSON text of one as OpenAI has it, or nothing."""
    name = encodable(name)  # with half a character in it, the next request could not be sent
    try:
        return ToolCall.from_openai({"function": {"name": name, "arguments": arguments}})
    except ValueError as error:
        return invalid(f"{str(error)[:1].upper()}{str(error)[1:]}")


class ServedParser(ToolParser):
    """Finds no calls in a text: the request holds the tools, and a server reads.

    Args:
        served_name: name of the parser of vLLM by which the policy server reads; ``None`` for an outside
            server, whose own one takes the calls out of the text.
    """

    separator = ""
    tools_in = "template"
    reads_text = False

    def __init__(self, served_name: str | None = None) -> None:
        self.served_name = served_name

    def parse(self, text: str) -> list[ToolCall]:
        return []

    def get_tool_prompt(self, schemas: list[Json]) -> str:
        raise ConfigError(
            f"parser_name={self.served_name or 'openai'!r} has no text that explains tools: leave tools_in "
            "out, or choose a parser of Troupe's own for your model, such as 'qwen'."
        )
