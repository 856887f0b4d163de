"""A rollout that failed is tried again after a pause, by another actor where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.rollouts.dispatcher import Dispatcher, choose_rollout
from actors.rollouts.requests import MAX_PAUSE_SECONDS, PendingRollout, pause_before
from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.slot import Slot, SlotState, WarmPair

SLOTS = st.frozensets(st.integers(0, 5))
NO_FACTORY: Any = SimpleNamespace()


def pending(position: int = 0, tried_by: Collection[int] = ()) -> PendingRollout:
    request = RolloutRequest(rollout_id=f"g/{position}", group_id="g", task={})
    return PendingRollout(request, (True, position), attempt=1 + len(tried_by), tried_by=set(tried_by))


def slots_of(*indices: int) -> dict[int, Slot]:
    """Slots that wait for a request."""
    return {index: Slot(index, NO_FACTORY, state=SlotState.IDLE) for index in indices}


def choose(waiting: list[PendingRollout], index: int, *indices: int) -> PendingRollout | None:
    slots = slots_of(*indices)
    return choose_rollout(waiting, slots[index], slots.values())


def test_pauses_double_up_to_a_limit() -> None:
    pauses = [pause_before(number) for number in range(1, 40)]
    assert pauses[0] == 0
    assert pauses[2] == 2 * pauses[1] and pauses[3] == 2 * pauses[2]
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_failed_rollout_is_left_to_another_slot() -> None:
    failed, fresh = pending(0, {1}), pending(1)
    assert choose([failed, fresh], 1, 1, 2) is fresh
    assert choose([failed, fresh], 2, 1, 2) is failed


def test_only_slot_tries_again_itself() -> None:
    failed = pending(0, {1})
    assert choose([failed], 1, 1) is failed


@given(st.lists(SLOTS, min_size=1, max_size=6), st.frozensets(st.integers(0, 5), min_size=1))
def test_some_slot_may_always_play_what_waits(tried: list[frozenset[int]], slots: frozenset[int]) -> None:
    waiting = [pending(position, tried_by) for position, tried_by in enumerate(tried)]
    assert any(choose(waiting, slot, *slots) is waiting[0] for slot in slots)


async def test_waiting_slot_takes_what_another_leaves_behind() -> None:
    slots = slots_of(1, 2)
    dispatcher = Dispatcher(slots)
    dispatcher.put(pending(0, {1}))
    taking = asyncio.create_task(dispatcher.take(slots[1]))
    await asyncio.sleep(0)
    assert not taking.done()
    slots[2].state = SlotState.GONE
    dispatcher.notify_waiters()
    rollout = await asyncio.wait_for(taking, 30)
    assert rollout is not None and rollout.tried_by == {1}


async def test_failed_rollout_waits_out_its_pause_and_counts_meanwhile() -> None:
    slots = slots_of(1, 2)
    dispatcher = Dispatcher(slots)
    dispatcher.retry(pending(), 1)
    assert dispatcher.num_waiting == 1
    again = await asyncio.wait_for(dispatcher.take(slots[2]), 30)
    assert again is not None and (again.attempt, again.tried_by) == (2, {1})
    assert dispatcher.num_waiting == 0


async def test_urgent_requests_go_first() -> None:
    slots = slots_of(1)
    dispatcher = Dispatcher(slots)
    for name, urgent in (("g", False), ("eval", True)):
        dispatcher.submit(RolloutRequest(rollout_id=name, group_id=name, task={}, urgent=urgent))
    taken = [await dispatcher.take(slots[1]) for _ in range(2)]
    assert [each.rollout_id for each in taken if each is not None] == ["eval", "g"]


def test_cancelled_rollout_waits_no_more() -> None:
    slots = slots_of(1)
    dispatcher = Dispatcher(slots)
    for number in (0, 1):
        dispatcher.submit(pending(number).request)
    first, second = dispatcher.find("g/0"), dispatcher.find("g/1")
    assert first is not None and second is not None
    dispatcher.cancel(first)
    assert dispatcher.find("g/0") is None and dispatcher.num_waiting == 1
    assert asyncio.run(dispatcher.take(slots[1])) is second
    dispatcher.cancel(second)  # it is played: its slot removes it, or it would be put again
    assert dispatcher.find("g/1") is second
    dispatcher.put(second)
    assert dispatcher.find("g/1") is None and dispatcher.num_waiting == 0


def test_slot_that_closes_a_pair_is_waited_for() -> None:
    slots = slots_of(1, 2)
    slots[2].state, slots[1].pair = SlotState.CLOSING, WarmPair("a", since=0.0)
    assert choose_rollout([pending(0, {1})], slots[1], slots.values()) is None, "it is left to slot 2"


def test_choice_of_a_fresh_rollout_needs_no_other_slot() -> None:
    """With 10,000 slots a look at each cost more than 40 ms for each rollout."""

    class Unread(dict[int, Slot]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("as many steps as slots")

    slots = Unread(slots_of(0, 1))
    fresh = pending()
    assert choose_rollout([fresh], slots[0], slots) is fresh  # type: ignore[arg-type]
    assert choose_rollout([], slots[0], slots) is None  # type: ignore[arg-type]
