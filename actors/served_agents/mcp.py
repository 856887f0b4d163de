"""Trained agents as tools of an MCP server, over streamable HTTP: one tool for each, ``ask_calculator``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.served_agents.client import PoolClient
from environments.errors import TroupeError
from policies.agent_api.frontend import PREFIX, AgentFrontend
from policies.model_api.limits import MAX_BODY_BYTES

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "The question or order, with all it needs."}},
    "required": ["message"],
    "additionalProperties": False,
}


class AgentTools:
    """The MCP server of one replica. It keeps nothing between requests, so that any replica answers any.

    Args:
        agents: plays the episodes.
        pools: of the agents, by name.
    """

    def __init__(self, agents: AgentFrontend, pools: Mapping[str, PoolClient]) -> None:
        self._agents, self._pools = agents, pools
        self._names = {f"ask_{name.removeprefix(PREFIX)}": name for name in pools}
        self._server: Server[Any] = Server(
            "troupe", on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )

    def answer(self) -> Response:
        """The response that answers the request that it is made for."""
        return _McpResponse(self._server)

    async def _list_tools(
        self, context: ServerRequestContext[Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(
                    name=tool,
                    title=name.removeprefix(PREFIX).replace("_", " ").capitalize(),
                    description=(await self._pools[name].profile()).description,
                    input_schema=ARGUMENTS,
                )
                for tool, name in self._names.items()
            ]
        )

    async def _call_tool(
        self, context: ServerRequestContext[Any], params: CallToolRequestParams
    ) -> CallToolResult:
        if params.name not in self._names:
            served = ", ".join(self._names) or "none"
            raise MCPError(INVALID_PARAMS, f"There is no tool {params.name!r}. Tools: {served}.")
        message = _message(params)
        assert context.request is not None
        name = self._names[params.name]
        charge = context.request.state.caller.charge_for(name)
        numbers = itertools.count(1)  # not those of the steps: of a second try they begin anew

        async def on_step(text: str) -> None:
            await context.session.report_progress(next(numbers), message=text)  # to a client that asks for it

        try:
            answer = await self._agents.answer(name, message, charge, on_step=on_step)
        except TroupeError as error:
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
        (choice,) = answer["choices"]
        return CallToolResult(content=[TextContent(type="text", text=choice["message"]["content"])])


def _message(params: CallToolRequestParams) -> str:
    """The argument of a call. Raises ``MCPError`` if it is not a text, or not the only one."""
    arguments = params.arguments or {}
    if unknown := sorted(arguments.keys() - {"message"}):
        raise MCPError(INVALID_PARAMS, f"{params.name} takes no argument {unknown[0]!r}: only 'message'.")
    message = arguments.get("message")
    if not isinstance(message, str):
        raise MCPError(INVALID_PARAMS, f"{params.name}: 'message' has to be a text, not {message!r}.")
    return message


class _McpResponse(Response):
    """Hands the request over to the SDK. What it has started ends with the response."""

    def __init__(self, server: Server[Any]) -> None:
        super().__init__()
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Host and Origin were checked by AccessControl, which stands in front of all routes.
        manager = StreamableHTTPSessionManager(
            self._server, stateless=True, max_request_body_size=MAX_BODY_BYTES
        )
        async with manager.run():
            await manager.handle_request(scope, receive, send)
