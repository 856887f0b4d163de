"""A part of a fleet, without processes; ``test_fleet_simulation.py`` plays whole fleets that have some."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.rollouts import fleet_parts
from actors.rollouts.fleet_parts import FleetPart, FleetParts, Order

PartHere: Any = FleetPart.__ray_metadata__.modified_class  # type: ignore[attr-defined]


async def test_turn_after_a_quiet_time_waits_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_parts, "GATHER_SECONDS", 0.05)
    part = PartHere()
    taking = asyncio.create_task(part.take())
    await asyncio.sleep(0.1)
    await part.record_turn("g/0", 1, 0, b"a turn")
    monkeypatch.setattr(fleet_parts, "GATHER_SECONDS", 600)
    assert await asyncio.wait_for(taking, 30) == ([("g/0", 1, 0, b"a turn")], [])


async def test_attempt_without_a_result_fails_the_fleet() -> None:
    """The error is none of Ray's, which are results of their own."""

    def run(*_: object) -> None:
        raise ValueError("unforeseen")

    part = PartHere()
    taking = asyncio.create_task(part.take())
    attempt: Any = SimpleNamespace(request=None)
    await part.play([Order(1, 7, 0, attempt)], {7: SimpleNamespace(run=SimpleNamespace(remote=run))})
    with pytest.raises(ValueError, match="unforeseen"):
        await asyncio.wait_for(taking, 30)


async def test_actors_beyond_those_of_the_fleet_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.sleep(600)

    async def dies() -> None:
        raise RayActorError

    take = never
    calls: Any = SimpleNamespace(take=SimpleNamespace(remote=lambda: take()))
    monkeypatch.setattr(fleet_parts, "start_actor", lambda *_, **__: calls)
    monkeypatch.setattr(fleet_parts, "beside_driver", dict)
    monkeypatch.setattr(fleet_parts, "PAIRS_OF_FLEET", 4)
    monkeypatch.setattr(fleet_parts, "PAIRS_PER_PART", 8)
    parts = FleetParts(SimpleNamespace())  # type: ignore[arg-type]
    taken = [parts.take(2) for _ in range(8)]
    assert taken[:2] == [None, None] and None not in taken[2:]
    assert [each.num_pairs for each in dict.fromkeys(taken[2:]) if each] == [8, 4]
    parts.leave(None, 1, 2)
    assert parts.take(2) is None
    parts.check()
    take = dies
    for _ in range(2):
        parts.take(4)
    await asyncio.sleep(0.01)
    with pytest.raises(RayActorError):
        parts.check()
