"""The base class of tools, their calls and their outputs."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from environments.background import run_coroutine
from environments.errors import ConfigError, TroupeError

logger = logging.getLogger(__name__)

INVALID_TOOL_CALL = "invalid_tool_call"
"""Name under which an agent passes on a call that no parser could read, as ``{"error": sentence}``."""

ToolFunction = Callable[..., Any]
"""A function with a docstring and a type hint on every parameter. It may be ``async``."""

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no number of JSON")
    return value


MODEL_JSON = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
"""Reads the JSON of tool calls: with line breaks within a string, which models write where an argument is a
program, and without NaN and infinities, which no other program could read again."""


@dataclass(frozen=True)
class ToolCall:
    """A model's call of a tool."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai(call: Any) -> ToolCall:
        """Read ``{"function": {"name": ..., "arguments": JSON text or dict}}``.

        Models and servers send an empty text, "null" or nothing for a tool without parameters: no arguments.

        Raises:
            ValueError: the call is malformed. The sentence is meant for the model.
        """
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call needs a function with a name and arguments.")
        name, arguments = function["name"], function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = MODEL_JSON.decode(arguments) if arguments.strip() else None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of {name!r} are no valid JSON object: {error}.") from error
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {name!r} have to be a JSON object.")
        return ToolCall(name, arguments)

    def to_openai(self) -> dict[str, Any]:
        """The call in OpenAI's shape, without an id."""
        # In ASCII: the model may have written half a surrogate pair, which has no UTF-8.
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolOutput:
    """The result of a tool: an output, or an error that the model can act on."""

    name: str
    output: Any = None
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_string(self) -> str:
        """Return the text that the model reads."""
        if self.error is not None:
            return encodable(f"Error: {self.error}")
        if self.output is None:
            return ""
        if isinstance(self.output, list | dict):
            return encodable(json.dumps(self.output, ensure_ascii=False, default=str))
        return encodable(str(self.output))

    def __str__(self) -> str:
        return self.to_string()


class Tool:
    """A function that a model may call.

    A subclass gives ``name`` and ``description`` (as class attributes or to ``__init__``) and implements
    ``forward``, or ``async_forward``, whose signature becomes the schema; it may override ``json`` to say
    more. Both may be coroutine functions: each call has an event loop of its own.

    ``Tool(function=function)`` calls that function; its name and the first paragraph of its docstring are the
    tool's where no others are given. ``FunctionTool`` does the same, and checks the arguments.
    """

    name: str = ""
    description: str = ""
    function: ToolFunction | None = None

    def __init__(
        self, name: str | None = None, description: str | None = None, function: ToolFunction | None = None
    ) -> None:
        if function is not None:
            self.function = function
            name = name or getattr(function, "__name__", None)
            description = description or first_paragraph(inspect.getdoc(function))
        self.name = name or self.name
        self.description = description or self.description
        if not self.name or not self.description:
            raise ConfigError(f"{type(self).__name__} has no name or no description: a model needs both.")

    @property
    def json(self) -> dict[str, Any]:
        """The tool's schema in the shape of OpenAI's ``tools`` parameter, or only the function in it."""
        function = {"name": self.name, "description": self.description, "parameters": self._parameters()}
        return {"type": "function", "function": function}

    def _parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        parameters = inspect.signature(self._implementation).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        hints = typing.get_type_hints(self._implementation)
        properties = {p.name: _json_type(hints.get(p.name)) for p in named}
        required = [p.name for p in named if p.default is p.empty]
        return {"type": "object", "properties": properties, "required": required}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the tool. Return a ToolOutput, or a bare value that becomes its output."""
        if self._implementation == self.forward:
            raise NotImplementedError(f"{type(self).__name__} must implement 'forward'.")
        return self._implementation(*args, **kwargs)

    async def async_forward(self, *args: Any, **kwargs: Any) -> Any:
        """``forward``, for those that await; a subclass may implement this instead of it."""
        output = self.forward(*args, **kwargs)
        return await output if inspect.iscoroutine(output) else output

    @property
    def _implementation(self) -> ToolFunction:
        """The method or function that the user has written."""
        if type(self).forward is not Tool.forward:
            return self.forward
        if self.function is not None:
            return self.function
        return self.forward if type(self).async_forward is Tool.async_forward else self.async_forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> ToolOutput:
        """Run ``forward``; an error that the model can have caused is returned as text for the model.

        An exception of ``forward`` is logged with its traceback. To end the rollout instead, because a
        service is down and no call could succeed, ``forward`` raises a TroupeError.
        """
        try:
            inspect.signature(self._implementation).bind(*args, **kwargs)
        except TypeError as error:
            return ToolOutput(self.name, error=f"wrong arguments for {self.name!r}: {error}.")
        try:
            output = self.forward(*args, **kwargs)
            if inspect.iscoroutine(output):
                output = _run(output)
            result = output if isinstance(output, ToolOutput) else ToolOutput(self.name, output=output)
            result.to_string()  # an output without a text, such as a list within itself, is an error too
        except TroupeError:
            raise
        except Exception as error:
            logger.warning("The tool %r raised on %s %s", self.name, args, kwargs, exc_info=True)
            return ToolOutput(self.name, error=f"{type(error).__name__}: {error}")
        return result


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it to its end, also in a cell of a notebook: there this thread has an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return run_coroutine(coroutine)


def openai_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema as OpenAI's ``tools`` parameter has it, also if it is only the function in it.

    Raises:
        ConfigError: it is neither.
    """
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"The schema of a tool is {schema!r}: write it as "
            "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': {...}}}."
        )
    return {"type": "function", "function": function}


def encodable(text: str) -> str:
    r"""Return the text as UTF-8 can have it: half a character, as a model may write \ud83d, is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def first_paragraph(documentation: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((documentation or "").partition("\n\n")[0].split())


def _json_type(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint; ``{}``, anything goes, where it is not a plain type."""
    choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    if type(None) in typing.get_args(hint) and len(choices) == 1:
        hint = choices[0]  # Optional
    plain = typing.get_origin(hint) or hint
    return {"type": _JSON_TYPES[plain]} if plain in _JSON_TYPES else {}
