"""The environment for the tools of one MCP server, with the arguments of rLLM v0.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from environments.base import Task, split_info
from environments.errors import ConfigError
from environments.rewards.base import RewardFunction
from environments.tool_environment import ToolEnvironment
from environments.tools.mcp.tool import MCPServer


class MCPEnvironment(ToolEnvironment):
    """``ToolEnvironment(tools=[MCPServer(command=..., args=..., env=...)])``, in the form of rLLM v0.1.

    The agent's side is ``ToolAgent`` with the same server in its ``tools``: both share one process of it.
    """

    def __init__(
        self,
        task: Task | None = None,
        mcp_server_command: str | None = None,
        mcp_server_args: Sequence[str] | None = None,
        mcp_server_env: Mapping[str, str] | None = None,
        reward_fn: RewardFunction | None = None,
        max_steps: int = 10,
    ) -> None:
        if mcp_server_command is None:
            raise ConfigError(
                "MCPEnvironment has no mcp_server_command: pass the command that starts the server."
            )
        server = MCPServer(command=mcp_server_command, args=mcp_server_args or (), env=mcp_server_env or {})
        super().__init__(task=task, tools=[server], reward_fn=reward_fn, max_steps=max_steps)

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Read the arguments of ``__init__``; see ``split_info`` for the task."""
        server_keys = {"mcp_server_command", "mcp_server_args", "mcp_server_env"}
        arguments, task = split_info(info, {*server_keys, "reward_fn", "max_steps"})
        return cls(task=task, **arguments)
