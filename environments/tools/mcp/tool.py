"""The tools of any MCP server, spoken to by the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from environments.tools.base import Tool, ToolOutput
from environments.tools.mcp.connection import ServerAddress, connection

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as Definition


class MCPServer(ServerAddress):
    """The address of an MCP server. ``tools=[MCPServer(...)]`` stands for all tools that it has.

    With a ``command`` and its ``args``, each process that uses the server starts one of its own and speaks
    to it by stdio: the agent and the environment of an actor share it, and it ends with the process.
    ``env`` is added to ``HOME``, ``PATH`` and the like; nothing else of our environment reaches it.
    With a ``url`` and ``headers``, it is one server for all actors, spoken to by streamable HTTP. To share
    a server, run it that way.

    ``prefix`` is put before the tools' names. A connection is made within ``start_seconds`` and kept for
    the life of the process; a call is answered within ``timeout_seconds``.

    Raises:
        ConfigError: there is not exactly one of ``command`` and ``url``, an argument belongs to the other,
            or a time is not above 0.
    """

    def tools(self) -> list[Tool]:
        """Return the server's tools. The first use in a process connects; after that it costs nothing.

        Raises:
            EnvironmentFailure: the server cannot be started or reached; the message ends with its stderr.
        """
        return [MCPTool(self, definition) for definition in connection(self).definitions()]

    def close(self) -> None:
        """End this process's connection, and the server that was started for it. A later use reconnects.

        Calling this is optional: both end with the process. It must not be called after each episode, since
        the next one would start the server again.
        """
        connection(self).close()


class MCPTool(Tool):
    """A tool of a server. The schema is the server's, and so is the check of the arguments."""

    def __init__(self, server: MCPServer, definition: Definition) -> None:
        description = definition.description or definition.title or definition.name
        super().__init__(server.prefix + definition.name, description)
        self._server = server
        self._definition = definition

    def _parameters(self) -> dict[str, Any]:
        return self._definition.input_schema

    def forward(self, /, **arguments: Any) -> ToolOutput:
        """Have the server run the tool. A call that it rejects or does not answer in time is an error.

        Raises:
            EnvironmentFailure: the server has ended, and cannot be started or reached again.
        """
        from mcp import MCPError

        try:
            result = connection(self._server).call(self._definition.name, arguments)
        except TimeoutError:
            limit = self._server.timeout_seconds
            return ToolOutput(self.name, error=f"{self.name!r} gave no answer within {limit:g} seconds.")
        except (MCPError, ConnectionError) as error:
            return ToolOutput(self.name, error=f"{self.name!r} failed: {error}.")
        return _output(self.name, result)


def _output(name: str, result: CallToolResult) -> ToolOutput:
    """The text of a result or, where there is none, its structured content, which texts mostly repeat."""
    text = "\n".join(_text(block) for block in result.content)
    if result.is_error:
        return ToolOutput(name, error=text or "the tool failed and did not say why.")
    structured = result.structured_content
    metadata = {} if structured is None else {"structured_content": structured}
    return ToolOutput(name, output=text or structured, metadata=metadata)


def _text(block: ContentBlock) -> str:
    """A block of content as text; an image or other data is described in a line."""
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, {len(block.data)} characters of base64]"
        case "resource_link":
            return f"[resource {block.uri}: {block.name}]"
        case "resource":
            return f"[resource {block.resource.uri}: {block.resource.mime_type or 'unknown type'}]"
