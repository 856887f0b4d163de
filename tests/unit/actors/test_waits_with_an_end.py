"""What waits in an actor for a replica ends, also when the replica has died. No Ray is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.ray_tools import calls
from actors.sampling import directory
from actors.weights import store


def plain(actor_class: Any) -> Any:
    """An object of the class behind a Ray actor."""
    return actor_class.__ray_metadata__.modified_class()


async def test_wait_for_newer_weights_ends_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WAIT_SECONDS", 0.05)
    weights = plain(store.WeightStore)
    nothing = await weights.newer_than(0)
    waiting = asyncio.create_task(weights.newer_than(0))
    await weights.publish(1, [])
    assert [nothing, (await waiting).version, await weights.newer_than(1)] == [None, 1, None]


async def test_wait_for_sampling_actors_ends_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PAIRING_SECONDS", 0.05)
    samplers = plain(directory.SamplerDirectory)
    nothing = await samplers.samplers_of("replica", 0, [])
    waiting = asyncio.create_task(samplers.samplers_of("replica", 0, []))
    await asyncio.sleep(0)
    await samplers.add("sampler")
    assert (nothing, await waiting) == ({}, {1: "sampler"})
    assert await samplers.samplers_of("replica", 0, [1]) == {1: "sampler"}
