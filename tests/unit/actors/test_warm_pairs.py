"""Choice of a slot while pairs wait for their messages, and rebuilding of a lost pair. Without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from actors.rollouts import fleet
from actors.rollouts.dispatcher import choose_rollout
from actors.rollouts.player import Attempt, PastMessage, RolloutResult
from actors.rollouts.requests import PastMessages, PendingRollout
from actors.rollouts.rollout import FollowUp, Pair, RolloutLimits, RolloutRequest, failed
from actors.rollouts.slot import Slot, SlotState, WarmPair
from actors.settings import FleetConfig
from environments import ToolEnvironment
from environments.base import BaseEnv
from environments.text_games import GuessEnvironment
from environments.types import TerminationReason
from policies import GameAgent

NO_FACTORY: Any = SimpleNamespace()


def message(name: str, after: str | None = None, seconds: float = 60) -> RolloutRequest:
    follow_up = None if after is None else FollowUp(after=after, message="Go on.")
    return RolloutRequest(rollout_id=name, group_id=name, task={}, follow_up=follow_up, keep_seconds=seconds)


def waiting(name: str, after: str | None = None) -> PendingRollout:
    return PendingRollout(message(name, after))


def warm(*names: str | None) -> list[Slot]:
    """Slots 0, 1, … that wait with the pairs of these messages, or without one; the first for longest."""
    return [
        Slot(index, NO_FACTORY, state=SlotState.IDLE)
        if name is None
        else Slot(index, NO_FACTORY, state=SlotState.WARM, pair=WarmPair(name, since=index))
        for index, name in enumerate(names)
    ]


def test_message_goes_to_its_pair_and_others_to_slots_without() -> None:
    slots = warm("a", "b", None)
    for name, index in (("a", 0), ("b", 1)):
        chosen = [choose_rollout([waiting("x", after=name)], each, slots) for each in slots]
        assert [each is not None for each in chosen] == [each.index == index for each in slots]
    chosen = [choose_rollout([waiting("new")], each, slots) for each in slots]
    assert [each is not None for each in chosen] == [False, False, True]


def test_pair_that_has_waited_longest_makes_room() -> None:
    slots = warm("oldest", "newer")
    for new in (waiting("new"), waiting("x", after="gone")):
        assert [choose_rollout([new], slot, slots) for slot in slots] == [new, None]


def test_message_does_not_wait_for_slots_that_are_at_work() -> None:
    slots = warm("oldest", "newer", None)
    new = waiting("new")
    for slot in (slots[0], slots[2]):
        slot.state = SlotState.PLAYING
    assert choose_rollout([new], slots[1], slots) is new


@given(
    retained_by=st.sets(st.integers(0, 3)),
    afters=st.lists(st.sampled_from([None, "0", "1", "2", "3", "gone"]), min_size=1, max_size=5),
    tried_by=st.frozensets(st.integers(0, 3)),
)
def test_some_idle_slot_always_plays_what_waits_first(
    retained_by: set[int], afters: list[str | None], tried_by: frozenset[int]
) -> None:
    slots = warm(*(str(index) if index in retained_by else None for index in range(4)))
    rollouts = [waiting(f"x{number}", after) for number, after in enumerate(afters)]
    if afters[0] is None or afters[0] not in map(str, retained_by):
        rollouts[0].tried_by = set(tried_by)
    assert any(choose_rollout(rollouts, slot, slots) is rollouts[0] for slot in slots)


class PlaceHere:
    """Answers at once, retains the pair of each message, and counts the pairs that it was to close."""

    def __init__(self) -> None:
        self.num_closed = 0
        self.histories: list[Sequence[PastMessage]] = []

    async def ready(self) -> str:
        return "here"

    async def run(self, attempt: Attempt) -> RolloutResult:
        self.histories.append(attempt.history)
        trajectory = failed(attempt.request, TerminationReason.ENV_DONE, "")
        turns = (trajectory.rollout_id.encode(),)
        return RolloutResult(trajectory, usable=True, retained=True, turns=turns)

    async def close_pair(self) -> bool:
        self.num_closed += 1
        return True


class Fleet:
    """The fleet's own code, with slots whose actors are here."""

    def __init__(self, patch: pytest.MonkeyPatch, env_class: type[BaseEnv] = GuessEnvironment) -> None:
        context = SimpleNamespace(get_node_id=lambda: "here", current_actor=None)
        patch.setattr(ray, "get_runtime_context", lambda: context)
        patch.setattr(ray, "kill", lambda actor: None)
        fleet_class = fleet.RolloutFleet.__ray_metadata__.modified_class  # type: ignore[attr-defined]
        pair = Pair(agent_class=GameAgent, env_class=env_class)
        self.fleet = fleet_class(pair, None, SimpleNamespace(), RolloutLimits(), FleetConfig(num_actors=2))
        self.slots, self.loop = self.fleet._slots, self.fleet._slot_loop
        for index in (0, 1):
            slot = self.slots[index] = Slot(index, self.fleet._factory, state=SlotState.IDLE, node="here")
            slot.place = PlaceHere()  # type: ignore[assignment]

    async def play(self, index: int, request: RolloutRequest) -> None:
        """Let the actor of a slot play a message that nobody has to wait for."""
        self.fleet._dispatcher.submit(request)
        slot = self.slots[index]
        rollout = await self.fleet._dispatcher.take(slot)
        assert rollout is not None and await self.loop._try(rollout, slot)
        slot.await_request()


async def test_pair_is_closed_when_nobody_has_written_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Fleet(monkeypatch)
    await played.play(0, message("a", seconds=0.05))
    slot = played.slots[0]
    assert slot.state is SlotState.WARM
    keeping = asyncio.create_task(played.loop._keep_busy(slot))
    while not slot.place.num_closed:
        await asyncio.sleep(0.01)
    assert slot.pair is None
    keeping.cancel()


async def test_pair_that_was_used_again_outlives_its_old_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Fleet(monkeypatch)
    await played.play(0, message("a", seconds=0.02))
    await played.play(0, message("b", after="a"))
    await asyncio.sleep(0.05)
    assert not played.slots[0].pair.is_over


async def test_another_actor_rebuilds_a_pair_from_all_messages_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Fleet(monkeypatch)
    first, second = message("first"), message("second", after="first")
    await played.play(0, first)
    await played.play(0, second)
    played.slots[0].pair = None
    await played.play(1, message("third", after="second"))
    assert played.slots[0].place.histories == [(), ()]
    history = (PastMessage(first, (b"first",)), PastMessage(second, (b"second",)))
    assert played.slots[1].place.histories == [history]
    assert played.slots[0].place.num_closed == played.slots[1].place.num_closed == 0


async def test_pair_is_closed_before_its_slot_plays_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Fleet(monkeypatch)
    await played.play(0, message("a"))
    played.slots[1].state = SlotState.PLAYING
    await played.play(0, message("new"))
    assert played.slots[0].place.num_closed == 1
    assert played.slots[0].pair.rollout_id == "new"


@pytest.mark.parametrize(
    ("env_class", "why"),
    [
        (ToolEnvironment, "its resumes_by is None"),
        (GuessEnvironment, "the journals of its messages are not kept any more"),
    ],
)
async def test_pair_that_cannot_be_rebuilt_is_lost(
    env_class: type[BaseEnv], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Fleet(monkeypatch, env_class)
    result = await played.loop._play(waiting("b", after="a"), played.slots[1])
    assert result.lost and result.usable
    assert why in str(result.trajectory.error) and env_class.__name__ in str(result.trajectory.error)


def test_failed_world_is_retried_only_where_it_can_be_rebuilt() -> None:
    failed, died = TerminationReason.ENV_ERROR, TerminationReason.CRASHED
    follow_up = waiting("b", after="a")
    assert follow_up.may_be_retried(failed, GuessEnvironment.resumes_by)
    lost = ToolEnvironment.resumes_by
    assert follow_up.may_be_retried(died, lost) and waiting("c").may_be_retried(failed, lost)
    assert not follow_up.may_be_retried(failed, lost)


def test_past_messages_are_limited_and_the_oldest_go_first() -> None:
    past = PastMessages(max_bytes=30)
    for name, after in (("a", None), ("b", None), ("c", "b")):
        past.retain(PastMessage(message(name, after), (b"x" * (10 if after is None else 4),)))
    assert [each.request.rollout_id for each in past.before(message("d", after="c")) or ()] == ["b", "c"]
    past.retain(PastMessage(message("e"), (b"x" * 10,)))
    assert past.before(message("d", after="a")) is None
    assert past.before(message("d", after="e")) is not None
    past.drop("b")
    assert past.before(message("d", after="c")) is None
