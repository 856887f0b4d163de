"""Which slot plays a message while pairs wait for theirs, and what is kept to rebuild one. Without actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollouts.attempts import Attempt, WaitingAttempts, choose_attempt
from actors.rollouts.kept_pairs import Histories, KeptPairs
from actors.rollouts.rollout import FollowUp, RolloutRequest
from actors.rollouts.rollout_actor import PastMessage, RolloutResult
from environments import ToolEnvironment
from environments.base import BaseEnv
from environments.text_games import GuessEnvironment
from environments.types import TerminationReason


def message(name: str, after: str | None = None, seconds: float = 60) -> RolloutRequest:
    follow_up = None if after is None else FollowUp(after=after, message="Go on.")
    return RolloutRequest(rollout_id=name, group_id=name, task={}, follow_up=follow_up, keep_seconds=seconds)


def waiting(name: str, after: str | None = None) -> Attempt:
    return Attempt((True, 0), message(name, after))


def with_kept(
    *names: str, env_class: type[BaseEnv] = GuessEnvironment, turns: tuple[bytes, ...] = (b"turn",)
) -> KeptPairs:
    """The slots 0, 1, … keep the pairs of these messages; the first has waited longest."""
    kept = KeptPairs(env_class, lambda: None)
    for slot, name in enumerate(names):
        kept.keep(slot, message(name), turns)
    return kept


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Pairs that are kept have a timer of asyncio."""

    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_loop
async def test_a_message_goes_to_its_pair_and_any_other_to_a_slot_without_one() -> None:
    kept = with_kept("a", "b")
    slots = {0, 1, 2}
    for name, slot in (("a", 0), ("b", 1)):
        chosen = [choose_attempt([waiting("x", after=name)], each, slots, kept, slots) for each in slots]
        assert [each is not None for each in chosen] == [each == slot for each in slots]
    chosen = [choose_attempt([waiting("new")], each, slots, kept, slots) for each in slots]
    assert [each is not None for each in chosen] == [False, False, True]


@in_loop
async def test_the_pair_that_has_waited_longest_makes_room() -> None:
    kept = with_kept("oldest", "newer")
    for new in (waiting("new"), waiting("x", after="gone")):
        chosen = [choose_attempt([new], slot, {0, 1}, kept, {0, 1}) for slot in (0, 1)]
        assert chosen == [new, None]


@in_loop
async def test_a_message_does_not_wait_for_slots_that_are_at_work() -> None:
    kept = with_kept("oldest", "newer")
    new = waiting("new")
    assert choose_attempt([new], 1, {0, 1, 2}, kept, idle={1}) is new


@settings(deadline=None)  # a busy machine is no failure
@given(
    kept_by=st.sets(st.integers(0, 3)),
    afters=st.lists(st.sampled_from([None, "0", "1", "2", "3", "gone"]), min_size=1, max_size=5),
    tried_by=st.frozensets(st.integers(0, 3)),
)
def test_some_idle_slot_always_plays_what_waits_first(
    kept_by: set[int], afters: list[str | None], tried_by: frozenset[int]
) -> None:
    async def play() -> None:
        slots = {0, 1, 2, 3}
        kept = KeptPairs(GuessEnvironment, lambda: None)
        for slot in kept_by:
            kept.keep(slot, message(str(slot)), ())
        attempts = [waiting(f"x{number}", after) for number, after in enumerate(afters)]
        if afters[0] is None or afters[0] not in map(str, kept_by):
            attempts[0] = Attempt((True, 0), attempts[0].request, tried_by=tried_by)
        assert any(choose_attempt(attempts, slot, slots, kept, slots) is attempts[0] for slot in slots)

    asyncio.run(play())


@in_loop
async def test_a_slot_closes_its_pair_when_nobody_has_written_for_so_long() -> None:
    kept = KeptPairs(GuessEnvironment, lambda: attempts.look_again())
    attempts = WaitingAttempts(lambda: {0}, kept)
    kept.keep(0, message("a", seconds=0.05), ())
    taking = asyncio.create_task(attempts.take(0))
    await asyncio.sleep(0)
    assert not taking.done()
    assert await asyncio.wait_for(taking, 30) is None and kept.is_over(0)


@in_loop
async def test_a_pair_that_was_used_again_is_not_given_back_by_its_old_timer() -> None:
    kept = KeptPairs(GuessEnvironment, lambda: None)
    kept.keep(0, message("a", seconds=0.02), ())
    kept.keep(0, message("b", after="a"), ())
    await asyncio.sleep(0.05)
    assert not kept.is_over(0)


class Actor:
    """Counts how often it was asked to close its pair."""

    def __init__(self) -> None:
        self.num_closed = 0
        self.close_kept = self

    async def remote(self) -> bool:
        self.num_closed += 1
        return True


@in_loop
async def test_another_actor_rebuilds_a_pair_from_all_messages_before() -> None:
    kept, actor = with_kept("first"), Actor()
    second = message("second", after="first")
    assert await kept.history(0, actor, second) == () and 0 not in kept
    kept.keep(0, second, (b"turn 2", b"turn 3"))
    history = await kept.history(1, actor, message("third", after="second"))
    assert history == (
        PastMessage(message("first"), (b"turn",)),
        PastMessage(second, (b"turn 2", b"turn 3")),
    )
    assert actor.num_closed == 0


@in_loop
async def test_a_slot_closes_its_pair_before_it_plays_anything_else() -> None:
    kept, actor = with_kept("a"), Actor()
    assert await kept.history(0, actor, message("new")) == ()
    assert actor.num_closed == 1 and 0 not in kept


@pytest.mark.parametrize(
    ("env_class", "turns", "why"),
    [
        (ToolEnvironment, (), "its resumes_by is None"),
        (GuessEnvironment, (), "the journals of its messages are not kept any more"),
    ],
)
def test_a_pair_that_cannot_be_rebuilt_is_lost(
    env_class: type[BaseEnv], turns: tuple[bytes, ...], why: str
) -> None:
    async def play() -> RolloutResult | tuple[PastMessage, ...]:
        kept = with_kept("a", env_class=env_class, turns=turns)
        return await kept.history(1, Actor(), message("b", after="a"))

    played = asyncio.run(play())
    assert isinstance(played, RolloutResult) and played.lost and played.usable
    assert why in str(played.trajectory.error) and env_class.__name__ in str(played.trajectory.error)


@in_loop
async def test_a_world_that_failed_is_tried_again_only_where_it_can_be_rebuilt() -> None:
    failed, died = TerminationReason.ENV_ERROR, TerminationReason.CRASHED
    follow_up = message("b", after="a")
    assert with_kept("a").may_retry(follow_up, failed)
    lost = with_kept("a", env_class=ToolEnvironment)
    assert lost.may_retry(follow_up, died) and lost.may_retry(message("c"), failed)
    assert not lost.may_retry(follow_up, failed)


def test_journals_of_conversations_take_limited_memory_and_the_oldest_go_first() -> None:
    histories = Histories(max_bytes=30)
    for name, after in (("a", None), ("b", None), ("c", "b")):
        histories.keep(PastMessage(message(name, after), (b"x" * (10 if after is None else 4),)))
    assert [each.request.rollout_id for each in histories.before(message("d", after="c")) or ()] == ["b", "c"]
    histories.keep(PastMessage(message("e"), (b"x" * 10,)))
    assert histories.before(message("d", after="a")) is None
    assert histories.before(message("d", after="e")) is not None
    histories.drop("b")
    assert histories.before(message("d", after="c")) is None
