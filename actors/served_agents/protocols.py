"""Protocols in which a replica's agents answer clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from actors.served_agents.client import PoolClient
from actors.settings import AgentsConfig
from environments.data.recordings import Recordings
from policies.agent_api.frontend import PREFIX, AgentFrontend
from policies.agent_api.responses import ResponsesFrontend
from policies.model_api.errors import NotFoundError, ServerError

if TYPE_CHECKING:
    from actors.served_agents.a2a import A2AFrontend
    from actors.served_agents.mcp import AgentTools

CARD_PATH = "/.well-known/agent-card.json"


class ServedAgents:
    """The agents of one replica in every protocol: chat, Responses, A2A and MCP.

    The packages of the last two are imported at the first request.

    Args:
        pools: of the agents, by name.
        config: of conversations, and of agents' answers.
        needs_key: whether clients have to send a key.
        version: returns the policy's version.
        count: takes in how each episode has ended, with the agent's name before.
        recordings: of answers, where they are recorded: messages of A2A may have feedback on them.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolClient],
        config: AgentsConfig,
        needs_key: bool,
        version: Callable[[], int],
        count: Callable[[str, str], None],
        recordings: Recordings | None = None,
    ) -> None:
        self._recordings = recordings
        self.pools, self._needs_key, self._version = pools, needs_key, version
        players = {name: pool.play for name, pool in pools.items()}
        self.chat = AgentFrontend(players, config.temperature, config.instructions, count)
        stores = {name: pool.responses for name, pool in pools.items()}
        self.responses = ResponsesFrontend(self.chat, stores)

    @cached_property
    def a2a(self) -> A2AFrontend:
        """Raises ``ServerError`` (501) without the package."""
        try:
            from actors.served_agents.a2a import A2AFrontend
        except ModuleNotFoundError as error:
            raise ServerError(
                f"This server speaks no A2A without the package {error.name!r}: pip install 'troupe[a2a]'.",
                status=501,
            ) from error
        return A2AFrontend(self.pools, self.chat, self._needs_key, self._version, self._recordings)

    @cached_property
    def tools(self) -> AgentTools:
        from actors.served_agents.mcp import AgentTools

        return AgentTools(self.chat, self.pools)

    def agent(self, name: str) -> str:
        """The agent that an address names. Raises ``NotFoundError`` if it is not served."""
        if PREFIX + name not in self.pools:
            raise NotFoundError(f"There is no agent {name!r} here. {self._addresses()}")
        return PREFIX + name

    def only_agent(self) -> str:
        """The name in the address of the one agent. Raises ``NotFoundError`` if there is not one."""
        if len(self.pools) != 1:
            raise NotFoundError(
                f"This address has the card of the only agent, of {len(self.pools)}. {self._addresses()}"
            )
        (name,) = self.pools
        return name.removeprefix(PREFIX)

    def _addresses(self) -> str:
        paths = (f"{agent_path(name.removeprefix(PREFIX))}{CARD_PATH}" for name in self.pools)
        return f"Cards that are served: {', '.join(paths) or 'none'}."


def agent_path(name: str) -> str:
    """Path at which an agent answers clients of A2A."""
    return f"/a2a/{name}"
