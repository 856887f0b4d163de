"""The official A2A client, as the tests of served agents use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.helpers.proto_helpers import new_text_message
from a2a.types.a2a_pb2 import (
    AgentCard,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    Task,
    TaskState,
)

QUESTION = "What is 12+34?"


@asynccontextmanager
async def connected(
    url: str, key: str = "", binding: str = "JSONRPC", **config: Any
) -> AsyncIterator[tuple[Client, AgentCard]]:
    """The official client, which has found the agent by its card."""
    config["supported_protocol_bindings"] = [binding]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        yield ClientFactory(ClientConfig(httpx_client=http, **config)).create(card), card


def question(text: str = QUESTION, **configuration: Any) -> SendMessageRequest:
    return SendMessageRequest(
        message=new_text_message(text, role=Role.ROLE_USER),
        configuration=SendMessageConfiguration(**configuration),
    )


async def only_task(client: Client, request: SendMessageRequest) -> Task:
    """The task that an answer in one piece holds."""
    (response,) = [each async for each in client.send_message(request)]
    return response.task


async def until(check: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(60):
        while not (found := await check()):
            await asyncio.sleep(0.01)
    return found


def state(task: Task) -> str:
    return TaskState.Name(task.status.state).removeprefix("TASK_STATE_")
