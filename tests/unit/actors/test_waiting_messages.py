"""Messages that wait until the one before them in their conversation has ended; without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from agent_server import ScriptedService

from actors.rollouts.rollout import Pair
from actors.served_agents import pool as agent_pool
from actors.settings import AgentsConfig, FleetConfig
from environments import ToolEnvironment
from environments.errors import SamplerError
from environments.types import Trajectory
from policies import ToolAgent
from policies.agent_api.context import RequestContext
from policies.model_api.errors import RequestError
from policies.sampler import SamplingParams


@pytest.fixture
def service() -> ScriptedService:
    service = ScriptedService()
    service.is_busy = True
    return service


@pytest.fixture
def pool(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(agent_pool, "AsyncRolloutService", lambda *_, **__: service)
    monkeypatch.setattr(agent_pool.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    pool_class = agent_pool.AgentPool.__ray_metadata__.modified_class
    pair = Pair(agent_class=ToolAgent, env_class=ToolEnvironment)
    settings = AgentsConfig(second_message="wait")
    service.consumer = pool_class(
        pair, lambda text: {"question": text}, None, None, FleetConfig(), "", settings
    )
    return service.consumer


async def played(pool: Any, key: str) -> Trajectory:
    """The episode of a message of the one session."""
    context = RequestContext(session="s", withdraw_key=key)
    *_, trajectory = [part async for part in pool.play(key, SamplingParams(), context)]
    return trajectory


async def until(ready: Any) -> None:
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0.01)


async def three_messages(pool: Any, service: ScriptedService) -> list[asyncio.Task[Trajectory]]:
    """Of one session: the first is played, and the others wait for it."""
    await pool.open()
    messages = [asyncio.create_task(played(pool, "first"))]
    await until(lambda: service.waiting)
    messages += [asyncio.create_task(played(pool, key)) for key in ("second", "third")]
    await asyncio.sleep(0.05)
    return messages


async def test_message_withdrawn_while_waiting_leaves_its_conversation(
    pool: Any, service: ScriptedService
) -> None:
    first, second, third = await three_messages(pool, service)
    assert await pool.call("messages", "withdraw", "", "second")
    with pytest.raises(RequestError, match="withdrawn"):
        await asyncio.wait_for(second, 60)
    service.finish(service.take())
    await first
    await until(lambda: service.waiting)
    service.finish(service.take())
    assert (await third).has_answer
    follow_ups = [request.follow_up and request.follow_up.message for request in service.asked]
    assert follow_ups == [None, "third"], "nothing of the second message was played"


async def test_waiting_message_whose_client_has_gone_takes_no_turn(
    pool: Any, service: ScriptedService
) -> None:
    first, second, third = await three_messages(pool, service)
    second.cancel()
    service.finish(service.take())
    await first
    await until(lambda: service.waiting)
    service.finish(service.take())
    assert (await third).has_answer and len(service.asked) == 2


@pytest.mark.slow
async def test_messages_end_with_an_error_where_the_fleet_has_died(
    pool: Any, service: ScriptedService
) -> None:
    await pool.open()
    message = asyncio.create_task(played(pool, "first"))
    await until(lambda: service.waiting)
    service.failure = RuntimeError("the fleet's process has ended")
    with pytest.raises(SamplerError, match="the fleet's process has ended"):
        await asyncio.wait_for(message, 60)
    with pytest.raises(SamplerError, match="the fleet's process has ended"):
        await pool.check()
