"""States of a slot while its actor starts, plays, retains a pair, closes it or is lost. Without processes."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.rollouts import slot as slot_module
from actors.rollouts.player import Attempt, RolloutResult
from actors.rollouts.requests import PendingRollout
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, failed
from actors.rollouts.slot import BUSY, Slot, SlotState
from environments.types import TerminationReason

REQUEST = RolloutRequest(rollout_id="g/0", group_id="g", task={}, keep_seconds=60)


class Place:
    """Ends each of its calls when the test says so, and reports the state of its slot meanwhile."""

    def __init__(self) -> None:
        self.calls: dict[str, asyncio.Future[Any]] = {}
        self.shared = SimpleNamespace(node="")
        for name in ("ready", "run", "close_pair"):
            setattr(self, name, lambda *_, name=name: self._call(name))

    def _call(self, name: str) -> asyncio.Future[Any]:
        self.calls[name] = asyncio.get_running_loop().create_future()
        return self.calls[name]

    async def end(self, name: str, result: Any) -> None:
        """End the call ``name`` with a result or an error, once it has come."""
        while name not in self.calls:
            await asyncio.sleep(0)
        call = self.calls.pop(name)
        if isinstance(result, Exception):
            call.set_exception(result)
        else:
            call.set_result(result)


@pytest.fixture
def factory() -> Any:
    """Makes one place, on a node that is never silent unless the test says so."""
    silence: list[asyncio.Future[None]] = []

    def of(node: str) -> asyncio.Future[None]:
        if not silence:
            silence.append(asyncio.get_running_loop().create_future())
        return silence[0]

    async def make() -> Place:
        return place

    place = Place()
    watch = SimpleNamespace(silence=of, away_from_silent_nodes=dict)
    nothing = SimpleNamespace(release=lambda place: None, retire=lambda shared: None)
    return SimpleNamespace(make=make, place=place, node_watch=watch, limits=RolloutLimits(), **vars(nothing))


def played(retained: bool = False) -> RolloutResult:
    return RolloutResult(failed(REQUEST, TerminationReason.ENV_DONE, ""), usable=True, retained=retained)


async def started(factory: Any) -> Slot:
    slot = Slot(0, factory)
    starting = asyncio.create_task(slot.start())
    await asyncio.sleep(0)
    assert slot.state is SlotState.STARTING and not slot.is_up
    await factory.place.end("ready", "here")
    assert await starting and slot.node == "here"
    slot.await_request()
    return slot


async def test_slot_is_idle_plays_is_warm_and_closes_its_pair(factory: Any) -> None:
    slot, actor, rollout = await started(factory), factory.place, PendingRollout(REQUEST)
    assert slot.state is SlotState.IDLE and slot.is_up
    checking = asyncio.create_task(slot.responds())
    await actor.end("ready", "here")
    assert await checking
    playing = asyncio.create_task(slot.play(rollout, Attempt(REQUEST)))
    await asyncio.sleep(0)
    assert slot.state is SlotState.PLAYING and slot.rollout is rollout
    await actor.end("run", played(retained=True))
    await playing
    slot.await_request()
    assert slot.state is SlotState.WARM and slot.rollout is None
    assert slot.pair is not None and slot.pair.rollout_id == "g/0"
    closing = asyncio.create_task(slot.close_pair())
    await asyncio.sleep(0)
    assert slot.state is SlotState.CLOSING and slot.pair is None
    await actor.end("close_pair", True)
    assert await closing
    slot.end_actor()
    assert slot.state is SlotState.GONE and not slot.is_up and slot.node == ""


def test_table_of_states_agrees_with_the_code(factory: Any) -> None:
    assert slot_module.__doc__ is not None
    lines = slot_module.__doc__.splitlines()
    first, second, last = (number for number, line in enumerate(lines) if line.startswith("==="))
    columns = [match.span() for match in re.finditer("=+", lines[first])]
    table = {}
    for row in lines[second + 1 : last]:
        name, _, is_up, is_cancelled, _ = (row[slice(*span)].strip() for span in columns)
        table[SlotState[name]] = (bool(is_up), bool(is_cancelled))
    assert table == {state: (Slot(0, factory, state=state).is_up, state not in BUSY) for state in SlotState}


@pytest.mark.parametrize("state", SlotState)
async def test_slot_is_cancelled_unless_it_is_busy(factory: Any, state: SlotState) -> None:
    slot = Slot(0, factory, state=state)
    slot.task = asyncio.create_task(asyncio.sleep(60))  # type: ignore[arg-type]
    assert slot.cancel() is slot.is_ending is (state not in BUSY)


async def test_actor_that_died_while_it_was_idle_does_not_respond(factory: Any) -> None:
    slot = await started(factory)
    checking = asyncio.create_task(slot.responds())
    await factory.place.end("ready", RayActorError())
    assert not await checking


@pytest.mark.parametrize("waits", [False, True])
async def test_actor_that_waits_is_called_before_it_plays(factory: Any, waits: bool) -> None:
    async def play_and_go_on() -> bool:
        await slot.play(PendingRollout(REQUEST), Attempt(REQUEST))
        if waits:
            await asyncio.sleep(0)
        return await slot.responds()

    slot = await started(factory)
    going_on = asyncio.create_task(play_and_go_on())
    await factory.place.end("run", played())
    if waits:  # it may have died since
        await asyncio.wait_for(factory.place.end("ready", RayActorError()), 1)
    assert await asyncio.wait_for(going_on, 1) is not waits and not factory.place.calls


@pytest.mark.parametrize("end", ["dies", "node is silent", "hangs"])
async def test_rollout_without_a_result_is_a_failed_one(
    factory: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = await started(factory)
    if end == "hangs":
        factory.limits = RolloutLimits(timeout_seconds=0)
        monkeypatch.setattr(slot_module, "ENV_CLOSE_SECONDS", 0.0)
        monkeypatch.setattr(slot_module, "LIMIT_GRACE_SECONDS", 0.0)
    playing = asyncio.create_task(slot.play(PendingRollout(REQUEST), Attempt(REQUEST)))
    await asyncio.sleep(0)
    if end == "dies":
        await factory.place.end("run", RayActorError())
    elif end == "node is silent":
        factory.node_watch.silence("here").set_result(None)
    result = await asyncio.wait_for(playing, 30)
    reason = TerminationReason.TIMEOUT if end == "hangs" else TerminationReason.CRASHED
    assert result.trajectory.termination_reason is reason and not result.usable
    assert slot.rollout is None and slot.pair is None
