"""The tools that models may call, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from environments.errors import ConfigError
from environments.tools.base import Tool, ToolCall, ToolOutput
from environments.tools.calculator import CalculatorTool

__all__ = ["TOOLS", "CalculatorTool", "Tool", "ToolCall", "ToolOutput", "make_tools", "tool_by_name"]

TOOLS: dict[str, type[Tool]] = {"calculator": CalculatorTool}
"""The tools that come with Troupe. For others, pass a ``tool_map``."""


def tool_by_name(name: str) -> Tool:
    """Make a tool that comes with Troupe, or raise a ConfigError that lists them."""
    if name not in TOOLS:
        raise ConfigError(f"Unknown tool {name!r}: use one of {sorted(TOOLS)}, or pass your own in tool_map.")
    return TOOLS[name]()


def make_tools(
    tools: Sequence[str] | None = None, tool_map: Mapping[str, type[Tool]] | None = None
) -> dict[str, Tool]:
    """Make tools from their names, or from a map of names to classes; return them by name.

    Raises:
        ConfigError: both are given, a name is unknown, or a class is no tool of that name.
    """
    if tools is not None and tool_map is not None:
        raise ConfigError(f"tools={tools!r} and tool_map={tool_map!r} exclude each other: pass only one.")
    if isinstance(tools, str):
        raise ConfigError(f"tools={tools!r} is a text: pass a list of names, [{tools!r}].")
    if tool_map is not None:
        return {name: _make(name, tool_class) for name, tool_class in tool_map.items()}
    return {name: tool_by_name(name) for name in tools or ()}


def _make(name: str, tool_class: type[Tool]) -> Tool:
    if not (isinstance(tool_class, type) and issubclass(tool_class, Tool)):
        raise ConfigError(f"tool_map[{name!r}]={tool_class!r} is no subclass of Tool: pass the class itself.")
    parameters = inspect.signature(tool_class).parameters
    takes_name = "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    tool = tool_class(name=name) if takes_name else tool_class()
    tool.name = name
    shown = tool.json["function"]["name"]
    if shown != name:  # the model would call a name that nobody answers to
        raise ConfigError(
            f"tool_map calls {tool_class.__name__} {name!r}, but its json says {shown!r}: rename one."
        )
    return tool
