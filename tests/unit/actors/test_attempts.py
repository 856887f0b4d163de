"""A rollout that failed is tried again after a pause, by another actor where there is one."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollouts.attempts import (
    MAX_PAUSE_SECONDS,
    Attempt,
    WaitingAttempts,
    choose_attempt,
    pause_before,
)
from actors.rollouts.kept_pairs import KeptPairs
from actors.rollouts.rollout import RolloutRequest
from environments.base import BaseEnv

NOTHING_KEPT = KeptPairs(BaseEnv, lambda: None)
SLOTS = st.frozensets(st.integers(0, 5))


def attempt(position: int = 0, tried_by: frozenset[int] = frozenset()) -> Attempt:
    request = RolloutRequest(rollout_id=f"g/{position}", group_id="g", task={})
    return Attempt((True, position), request, number=1 + len(tried_by), tried_by=tried_by)


def test_pauses_double_up_to_a_limit() -> None:
    pauses = [pause_before(number) for number in range(1, 40)]
    assert pauses[0] == 0
    assert pauses[2] == 2 * pauses[1] and pauses[3] == 2 * pauses[2]
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_a_slot_leaves_what_it_has_failed_at_to_another() -> None:
    failed, fresh = attempt(0, frozenset({1})), attempt(1)
    assert choose_attempt([failed, fresh], 1, {1, 2}, NOTHING_KEPT, ()) is fresh
    assert choose_attempt([failed, fresh], 2, {1, 2}, NOTHING_KEPT, ()) is failed


def test_the_only_slot_tries_again_itself() -> None:
    failed = attempt(0, frozenset({1}))
    assert choose_attempt([failed], 1, {1}, NOTHING_KEPT, ()) is failed


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(SLOTS, min_size=1, max_size=6), st.frozensets(st.integers(0, 5), min_size=1))
def test_some_slot_may_always_play_what_waits(tried: list[frozenset[int]], slots: frozenset[int]) -> None:
    waiting = [attempt(position, tried_by) for position, tried_by in enumerate(tried)]
    assert any(choose_attempt(waiting, slot, slots, NOTHING_KEPT, ()) is waiting[0] for slot in slots)


def test_a_slot_that_waits_takes_what_its_last_rival_leaves_behind() -> None:
    async def play() -> Attempt:
        slots = {1, 2}
        waiting = WaitingAttempts(lambda: slots, NOTHING_KEPT)
        waiting.put(attempt(0, frozenset({1})))
        taking = asyncio.create_task(waiting.take(1))
        await asyncio.sleep(0)
        assert not taking.done()
        slots.remove(2)
        waiting.look_again()
        return await asyncio.wait_for(taking, 30)

    assert asyncio.run(play()).tried_by == {1}


def test_a_failed_attempt_waits_out_its_pause_and_counts_meanwhile() -> None:
    async def play() -> list[int]:
        waiting = WaitingAttempts(lambda: {1, 2}, NOTHING_KEPT)
        waiting.put_later(attempt().again(1))
        lengths = [len(waiting)]
        again = await asyncio.wait_for(waiting.take(2), 30)
        assert (again.number, again.tried_by) == (2, {1})
        return [*lengths, len(waiting)]

    assert asyncio.run(play()) == [1, 0]


def test_urgent_requests_go_first() -> None:
    async def play() -> list[str]:
        waiting = WaitingAttempts(lambda: {1}, NOTHING_KEPT)
        waiting.put(attempt(5))
        waiting.put(Attempt((False, 9), RolloutRequest(rollout_id="eval", group_id="e", task={})))
        return [(await waiting.take(1)).request.rollout_id for _ in range(2)]

    assert asyncio.run(play()) == ["eval", "g/5"]


def test_an_attempt_that_is_withdrawn_waits_no_more() -> None:
    waiting = WaitingAttempts(lambda: (), NOTHING_KEPT)
    for position in (0, 1):
        waiting.put(attempt(position))
    assert waiting.withdraw("g/0")
    assert not waiting.withdraw("g/0")
    assert len(waiting) == 1
    assert asyncio.run(waiting.take(1)) == attempt(1)
