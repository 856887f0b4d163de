"""The addresses at which agents answer clients of A2A and MCP. ``AccessControl`` stands in front of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import Response
from ray import serve

from actors.served_agents.client import PoolClient
from policies.agent_api.frontend import PREFIX, AgentFrontend
from policies.model_api.errors import InvalidRequestError, NotFoundError, NotInstalledError

if TYPE_CHECKING:
    from actors.served_agents.a2a import A2AFrontend
    from actors.served_agents.mcp import AgentTools

CARD_PATH = "/.well-known/agent-card.json"
JSON_RPC = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "jsonrpc": {"const": "2.0"},
                        "id": {"type": ["string", "integer", "null"]},
                        "method": {"type": "string"},
                        "params": {"type": "object"},
                    },
                    "required": ["jsonrpc", "method"],
                }
            }
        },
    }
}
"""Schema of a JSON-RPC 2.0 body, as A2A and MCP have it, for the description of the endpoint."""

agent_routes = APIRouter()


class AgentProtocols:
    """Answers of a replica to clients of A2A and MCP; the packages are imported at the first request.

    Args:
        pools: of the agents, by name.
        agents: plays the episodes.
        needs_key: whether clients have to send a key.
        version: returns the policy's version.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolClient],
        agents: AgentFrontend,
        needs_key: bool,
        version: Callable[[], int],
    ) -> None:
        self._pools, self._agents, self._needs_key, self._version = pools, agents, needs_key, version

    @cached_property
    def a2a(self) -> A2AFrontend:
        """Raises ``NotInstalledError`` without the package."""
        try:
            from actors.served_agents.a2a import A2AFrontend
        except ModuleNotFoundError as error:
            raise NotInstalledError(
                f"This server cannot speak A2A: the package {error.name!r} is missing. "
                "`pip install 'troupe[a2a]'` installs it.",
            ) from error
        return A2AFrontend(self._pools, self._agents, self._needs_key, self._version)

    @cached_property
    def tools(self) -> AgentTools:
        from actors.served_agents.mcp import AgentTools

        return AgentTools(self._agents, self._pools)

    def agent(self, name: str) -> str:
        """The agent that an address names. Raises ``NotFoundError`` if it is not served."""
        if PREFIX + name not in self._pools:
            raise NotFoundError(f"There is no agent {name!r} here. {self._addresses()}")
        return PREFIX + name

    def only_agent(self) -> str:
        """The name in the address of the one agent. Raises ``NotFoundError`` if there is not one."""
        if len(self._pools) != 1:
            raise NotFoundError(
                f"This address has the card of the only agent, of {len(self._pools)}. {self._addresses()}",
            )
        (name,) = self._pools
        return name.removeprefix(PREFIX)

    def _addresses(self) -> str:
        paths = (f"{agent_path(name.removeprefix(PREFIX))}{CARD_PATH}" for name in self._pools)
        return f"Cards that are served: {', '.join(paths) or 'none'}."


def agent_path(name: str) -> str:
    """Path at which an agent answers clients of A2A."""
    return f"/a2a/{name}"


def _protocols() -> AgentProtocols:
    protocols: AgentProtocols = serve.get_replica_context().servable_object.agent_protocols
    return protocols


@agent_routes.get(CARD_PATH)
async def only_card(request: Request) -> Response:
    """The A2A card of the agent, where one is served."""
    return await card(_protocols().only_agent(), request)


@agent_routes.get(f"{agent_path('{name}')}{CARD_PATH}")
async def card(name: str, request: Request) -> Response:
    """The A2A card of an agent, with the address by which clients reach it."""
    protocols = _protocols()
    agent = protocols.agent(name)
    url = serve.get_replica_context().servable_object.access.address_for(request) + agent_path(name)
    return await protocols.a2a.card(agent, url, request)


@agent_routes.post(agent_path("{name}"), openapi_extra=JSON_RPC)
async def a2a(name: str, request: Request) -> Response:
    """A2A over JSON-RPC."""
    protocols = _protocols()
    return await protocols.a2a.answer(protocols.agent(name), "/", request)


@agent_routes.get(agent_path("{name}") + "/{path:path}")
@agent_routes.post(agent_path("{name}") + "/{path:path}")
@agent_routes.delete(agent_path("{name}") + "/{path:path}")
async def a2a_rest(name: str, path: str, request: Request) -> Response:
    """A2A over HTTP and JSON: ``message:send``, ``message:stream``, ``tasks`` and ``tasks/{id}:cancel``."""
    protocols = _protocols()
    try:  # the SDK takes this for a fault of its own
        (await request.body()).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body is no UTF-8 at position {error.start}: {error.reason}."
        ) from error
    return await protocols.a2a.answer(protocols.agent(name), f"/{path}", request)


@agent_routes.post("/mcp", openapi_extra=JSON_RPC)
async def mcp() -> Response:
    """MCP over streamable HTTP: a tool for each agent."""
    return _protocols().tools.answer()
