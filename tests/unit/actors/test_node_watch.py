"""End of the wait for an actor that was kept away from a silent node, when that node is back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.ray_tools import node_watch
from actors.ray_tools.node_watch import NodeWatch
from actors.rollouts.actor_factory import wait_until_ready
from actors.timing import NODE_SILENCE_SECONDS


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> NodeWatch:
    """A watch of a node "there", whose beats are judged by the tests alone."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(node_watch.ray, "get_runtime_context", lambda: context)

    async def never(self: NodeWatch, node: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(NodeWatch, "_watch", never)
    return NodeWatch()


def actor(ready: asyncio.Future[str]) -> Any:
    """An actor that is up when ``ready`` is done."""
    return SimpleNamespace(ready=lambda: ready)


async def test_actor_without_room_is_given_up_when_its_node_is_back(watch: NodeWatch) -> None:
    with watch.watched("there"):
        watch._judge("there", NODE_SILENCE_SECONDS)
        assert watch.away_from_silent_nodes() == {"ray.io/node-id": "!in(there)"}
        starting = asyncio.create_task(wait_until_ready(actor(asyncio.Future()), watch))
        await asyncio.sleep(0)
        assert not starting.done()
        watch._judge("there", 0)
        assert await asyncio.wait_for(starting, 15) is None
        assert watch.away_from_silent_nodes() == {}


async def test_actor_that_starts_elsewhere_is_taken(
    watch: NodeWatch,
) -> None:
    for misses in (0, NODE_SILENCE_SECONDS):
        ready: asyncio.Future[str] = asyncio.Future()
        with watch.watched("there"):
            watch._judge("there", misses)
            starting = asyncio.create_task(wait_until_ready(actor(ready), watch))
            await asyncio.sleep(0)
            assert not starting.done()
            ready.set_result("elsewhere")
            assert await asyncio.wait_for(starting, 15) == "elsewhere"
