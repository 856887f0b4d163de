"""Agents as tools: the official MCP client against the real application, on a port of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from agent_server import ALICE, AgentServer

from environments.types import StepEvent

if TYPE_CHECKING:
    from mcp import Client

pytestmark = pytest.mark.slow  # with the official clients, over a real port

QUESTION = {"message": "What is 12+34?"}


@pytest.fixture
def server(keyed_server: AgentServer) -> AgentServer:
    keyed_server.service.reset()
    return keyed_server


@asynccontextmanager
async def connected(
    server: AgentServer, key: str = ALICE, mode: str = "auto", on_request: Any = None, on_response: Any = None
) -> AsyncIterator[Client]:
    """The official client, with what hears of its requests and responses."""
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    hooks = {"request": [on_request] if on_request else [], "response": [on_response] if on_response else []}
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60, event_hooks=hooks) as http,
        Client(streamable_http_client(f"{server.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_each_agent_is_a_tool_that_answers(
    server: AgentServer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[tuple[str | None, int]] = []
    monkeypatch.setattr(
        "actors.serving.access.Caller.charge_tokens", lambda self, number: charged.append((self.name, number))
    )
    async with connected(server, mode=mode) as client:
        listed, answer = await client.list_tools(), await client.call_tool("ask_calculator", QUESTION)
    (tool,) = listed.tools
    assert (tool.name, tool.title, tool.description) == ("ask_calculator", "Calculator", "Adds numbers.")
    assert tool.input_schema["required"] == ["message"]
    assert (answer.content[0].text, answer.is_error) == ("46", False)
    assert charged == [("alice", 11)]
    metrics = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {ALICE}"}).text
    assert 'troupe_http_tokens_total{key="alice",model="agent/calculator"}' in metrics


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("follows", [True, False])
async def test_step_of_an_agent_is_progress_for_a_client_that_asks(
    server: AgentServer, mode: str, follows: bool
) -> None:
    server.service.is_busy = True
    heard: list[tuple[float, float | None, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    def play() -> None:
        """Two steps, and the first of them once more: the rollout was played anew."""
        request = server.service.take()
        for index, text in ((0, "12+34"), (1, "46*1"), (0, "34+12")):
            server.on_step(request.rollout_id, StepEvent(index=index, text=text, observation="46"))
        server.service.finish(request)

    async with connected(server, mode=mode) as client:
        callback = note if follows else None
        asked = asyncio.create_task(client.call_tool("ask_calculator", QUESTION, progress_callback=callback))
        async with asyncio.timeout(60):
            while not server.service.waiting:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(play)
        answer = await asked
        async with asyncio.timeout(60):
            while follows and len(heard) < 3:
                await asyncio.sleep(0.01)
    assert answer.content[0].text == "46"
    texts = ("12+34", "46*1", "34+12") if follows else ()
    assert heard == [(number, None, f"{text}\n46\n") for number, text in enumerate(texts, 1)]


async def test_failed_episode_is_a_result_with_an_error(server: AgentServer) -> None:
    server.service.is_busy = True
    async with connected(server) as client:
        asked = asyncio.create_task(client.call_tool("ask_calculator", QUESTION))
        async with asyncio.timeout(60):
            while not server.service.waiting:
                await asyncio.sleep(0.01)
        server.service.fail(server.service.take(), "it broke\n  at line 3")
        answer = await asked
    assert answer.is_error and "it broke" in answer.content[0].text and "line 3" not in answer.content[0].text


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("ask_none", QUESTION, "no tool 'ask_none'. Tools: ask_calculator"),
        ("ask_calculator", {}, "'message' has to be a text, not None"),
        ("ask_calculator", {"message": 3}, "'message' has to be a text, not 3"),
        ("ask_calculator", {**QUESTION, "loud": True}, "takes no argument 'loud'"),
    ],
)
async def test_call_that_is_wrong_is_an_error_that_names_what(
    server: AgentServer, tool: str, arguments: dict[str, Any], said: str
) -> None:
    from mcp.shared.exceptions import MCPError

    async with connected(server) as client:
        with pytest.raises(MCPError, match=said):
            await client.call_tool(tool, arguments)


def test_half_a_character_is_an_error(server: AgentServer) -> None:
    call = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "ask_calculator", %s}}'
    answer = httpx.post(
        f"{server.url}/mcp",
        content=call % '"arguments": {"message": "\\ud800"}',
        headers={
            "authorization": f"Bearer {ALICE}",
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
        },
    )
    assert answer.status_code < 500 and "rror" in answer.text, answer.text


async def test_without_a_key_of_the_server_no_tool_is_reached(server: AgentServer) -> None:
    statuses: list[int] = []

    async def note(response: httpx2.Response) -> None:
        statuses.append(response.status_code)

    with pytest.raises(ExceptionGroup):
        async with connected(server, key="wrong-0123456789abcdef", on_response=note) as client:
            await client.list_tools()
    assert set(statuses) == {401}
    answer = httpx.post(f"{server.url}/mcp", json={})
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


async def test_foreign_name_reaches_no_tool(server: AgentServer) -> None:
    statuses: list[int] = []

    async def rename(request: httpx2.Request) -> None:
        request.headers["host"] = "evil.example"

    async def note(response: httpx2.Response) -> None:
        statuses.append(response.status_code)

    with pytest.raises(ExceptionGroup):
        async with connected(server, on_request=rename, on_response=note) as client:
            await client.list_tools()
    assert set(statuses) == {403}


def test_there_is_no_session_to_listen_to_or_to_end(server: AgentServer) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"{server.url}/mcp", headers={"authorization": f"Bearer {ALICE}"})
        assert answer.status_code == 405, method
