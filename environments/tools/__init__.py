"""The tools that models may call: by name, as Python functions, from MCP servers, or of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from pkgutil import resolve_name

from environments.errors import ConfigError
from environments.tools.base import Tool, ToolCall, ToolFunction, ToolOutput, openai_schema
from environments.tools.calculator import CalculatorTool
from environments.tools.function import FunctionTool
from environments.tools.mcp.tool import MCPServer

__all__ = [
    "TOOLS",
    "CalculatorTool",
    "FunctionTool",
    "MCPServer",
    "NamedToolSource",
    "Tool",
    "ToolCall",
    "ToolFunction",
    "ToolOutput",
    "ToolSource",
    "make_tools",
    "tool_by_name",
]

TOOLS = {
    "calculator": "environments.tools.calculator:CalculatorTool",
    "local_search": "environments.tools.retrieval:LocalRetrievalTool",
    "python": "environments.tools.python:PythonTool",
}
"""The classes of the tools that come with Troupe, by name; imported when they are asked for."""

NamedToolSource = type[Tool] | ToolFunction
"""A tool that can be given another name: a class, or a Python function with type hints and a docstring."""

ToolSource = str | Tool | MCPServer | NamedToolSource
"""Source of tools: also a name from ``TOOLS``, a tool ready for use, or a server with all its tools."""


def tool_by_name(name: str) -> Tool:
    """Make a tool that comes with Troupe, or raise a ConfigError that lists them."""
    if name not in TOOLS:
        raise ConfigError(f"Unknown tool {name!r}: use one of {sorted(TOOLS)}, a function or a Tool class.")
    return resolve_name(TOOLS[name])()


def make_tools(
    tools: Sequence[ToolSource] | None = None, tool_map: Mapping[str, NamedToolSource] | None = None
) -> dict[str, Tool]:
    """Make tools from their sources, or from a map of names to classes and functions; return them by name.

    Raises:
        ConfigError: both are given, a source is none, or two tools have one name.
        EnvironmentFailure: a server cannot be started or reached.
    """
    if tools is not None and tool_map is not None:
        raise ConfigError(f"tools={tools!r} and tool_map={tool_map!r} exclude each other: pass only one.")
    if isinstance(tools, str):
        raise ConfigError(f"tools={tools!r} is a text: pass a list of names, [{tools!r}].")
    if tool_map is not None:
        return {name: _named(name, source) for name, source in tool_map.items()}
    named: dict[str, Tool] = {}
    for tool in chain.from_iterable(map(_tools_of, tools or ())):
        if tool.name in named:
            raise ConfigError(
                f"Two tools are called {tool.name!r}: leave one out, or rename it by tool_map or by the "
                "prefix of its MCPServer."
            )
        named[tool.name] = tool
    return named


def _tools_of(source: ToolSource) -> list[Tool]:
    if isinstance(source, str):
        return [tool_by_name(source)]
    if isinstance(source, Tool):
        return [source]
    if isinstance(source, MCPServer):
        return source.tools()
    if isinstance(source, type) and issubclass(source, Tool):
        return [source()]
    return [FunctionTool(source)]


def _named(name: str, source: NamedToolSource) -> Tool:
    if inspect.isroutine(source):
        return FunctionTool(source, name)
    if not (isinstance(source, type) and issubclass(source, Tool)):
        raise ConfigError(
            f"tool_map[{name!r}]={source!r} is no subclass of Tool and no function: pass one, or put a tool "
            "that has a name of its own into tools."
        )
    parameters = inspect.signature(source).parameters
    takes_name = "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    tool = source(name=name) if takes_name else source()
    tool.name = name
    shown = openai_schema(tool.json)["function"]["name"]
    if shown != name:  # the model would call a tool that does not exist
        raise ConfigError(f"tool_map calls {source.__name__} {name!r}, but its json {shown!r}: rename one.")
    return tool
