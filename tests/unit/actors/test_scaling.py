"""The number of rollout actors follows the load: in a simulation of updates, without processes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollouts.fleet_report import FleetStatus
from actors.rollouts.scaling import (
    LEARNER_WAITS,
    SPARE_SECONDS,
    TO_GROW,
    TO_SHRINK,
    Load,
    PoolSize,
    ScalingPolicy,
)

NUM_ROLLOUTS = 256
"""Requested at the same time: a fleet of more actors than that gains nothing."""


def load(num_actors: int, rollout_seconds: float, learner_seconds: float, room: int) -> Load:
    """Load of an update that learns while the rollouts of the next one are played."""
    num_ready = min(num_actors, room)
    playing = NUM_ROLLOUTS * rollout_seconds / min(num_ready, NUM_ROLLOUTS)
    seconds = max(playing, learner_seconds)
    return Load(
        learner_waits=max(0.0, playing - learner_seconds) / seconds,
        actors_idle=1 - NUM_ROLLOUTS * rollout_seconds / (num_ready * seconds),
        requests_waiting=max(0, NUM_ROLLOUTS - num_ready) * playing / seconds / 2,
        num_actors=num_actors,
        num_ready=num_ready,
    )


def sizes(
    policy: ScalingPolicy, start: int, phases: list[tuple[float, float]], num_updates: int, room: int = 10**6
) -> list[int]:
    """The numbers of actors over the phases, given as seconds of a rollout and of the learner."""
    number, found = start, []
    for rollout_seconds, learner_seconds in phases:
        for _ in range(num_updates):
            number = policy.decide(load(number, rollout_seconds, learner_seconds, room))
            found.append(number)
    return found


def num_turns(numbers: list[int]) -> int:
    """Number of changes between growing and shrinking."""
    steps = [after - before for before, after in itertools.pairwise(numbers) if after != before]
    return sum(one * other < 0 for one, other in itertools.pairwise(steps))


seconds = st.floats(0.1, 100)


@given(rollout_seconds=seconds, learner_seconds=seconds, start=st.integers(1, 300))
@settings(max_examples=1000)
@pytest.mark.slow
def test_steady_load_is_followed_without_flapping(
    rollout_seconds: float, learner_seconds: float, start: int
) -> None:
    policy = ScalingPolicy(1, 1000)
    numbers = sizes(policy, start, [(rollout_seconds, learner_seconds)], 100)
    assert num_turns(numbers) <= 1
    assert len(set(numbers[-20:])) == 1, "it comes to rest"
    last = load(numbers[-1], rollout_seconds, learner_seconds, 10**6)
    assert last.learner_waits <= LEARNER_WAITS or numbers[-1] >= NUM_ROLLOUTS - 2
    smallest = min(NUM_ROLLOUTS, math.ceil(NUM_ROLLOUTS * rollout_seconds / learner_seconds))
    assert numbers[-1] <= max(start, 2 * smallest + 1)


@given(
    phases=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6),
    smallest=st.integers(1, 20),
    more=st.integers(0, 200),
    room=st.integers(1, 300),
)
@settings(max_examples=300)
def test_number_stays_between_its_bounds_and_waits_for_room(
    phases: list[tuple[float, float]], smallest: int, more: int, room: int
) -> None:
    numbers = sizes(ScalingPolicy(smallest, smallest + more), smallest, phases, 20, room)
    assert all(smallest <= number <= smallest + more for number in numbers)
    for before, after in itertools.pairwise(numbers):
        assert before <= room or after <= before, "where there is no room left, it asks once and waits for it"


def test_fleet_that_waits_for_room_shrinks_when_it_needs_none() -> None:
    numbers = sizes(ScalingPolicy(4, 100), 4, [(20, 64), (1, 64)], 20, room=20)
    assert numbers[19] > 20 and numbers[-1] < 10


def test_load_that_alternates_is_followed_in_both_directions() -> None:
    # The learner takes 64 s; 256 rollouts of 4 s need 16 actors, of 16 s 64.
    numbers = sizes(ScalingPolicy(4, 128), 16, [(4, 64), (16, 64), (4, 64)], 30)
    assert 12 <= numbers[29] <= 32 and 48 <= numbers[59] <= 96 and numbers[89] < numbers[59]


CALM = Load(learner_waits=0.05, actors_idle=0.2, requests_waiting=3, num_actors=8, num_ready=8)
SLOW = Load(learner_waits=0.75, actors_idle=0.0, requests_waiting=99, num_actors=8, num_ready=8)
IDLE = Load(learner_waits=0.0, actors_idle=0.9, requests_waiting=0, num_actors=8, num_ready=8)


def decisions(*loads: Load) -> list[int]:
    policy = ScalingPolicy(1, 100)
    return [policy.decide(each) for each in loads]


def test_one_slow_update_and_a_few_idle_ones_change_nothing() -> None:
    assert decisions(CALM, SLOW, CALM, CALM, SLOW, CALM) == [8] * 6
    assert decisions(*[IDLE] * (TO_SHRINK - 1), CALM, *[IDLE] * (TO_SHRINK - 1)) == [8] * (2 * TO_SHRINK - 1)


def test_slow_updates_are_followed_at_once() -> None:
    assert decisions(*[SLOW] * TO_GROW) == [8] * (TO_GROW - 1) + [32]
    # Every other update is a slow one, as with a staleness of 1.
    assert decisions(SLOW, CALM, SLOW) == [8, 8, 32]
    assert decisions(SLOW, IDLE, SLOW) == [8, 8, 32]


def test_fleet_does_not_grow_beyond_the_waiting_rollouts() -> None:
    assert decisions(*[replace(SLOW, requests_waiting=2)] * TO_GROW)[-1] == 10


def test_fleet_keeps_half_of_its_actors_and_some_to_spare() -> None:
    assert decisions(*[IDLE] * TO_SHRINK) == [8] * (TO_SHRINK - 1) + [4]
    assert decisions(*[replace(IDLE, actors_idle=0.6)] * TO_SHRINK)[-1] == math.ceil(8 * 0.4 / 0.7)


def test_updates_with_fewer_actors_do_not_count() -> None:
    grown = replace(IDLE, num_actors=32, num_ready=32)
    assert decisions(*[IDLE] * (TO_SHRINK - 1), *[grown] * (TO_SHRINK - 1))[-1] == 32


def pool_status(
    num_actors: int, playing: int = 0, kept: int = 0, waiting: int = 0, last: int = 0
) -> FleetStatus:
    return FleetStatus(
        num_actors=num_actors,
        num_ready=num_actors,
        num_waiting=waiting,
        num_running=playing,
        num_lost=0,
        busy_seconds=0,
        seconds=0,
        num_replayed_tokens=0,
        num_warm=kept,
        last_taken=last or playing + kept,
    )


def test_served_agent_has_an_actor_per_message_and_one_spare() -> None:
    size = PoolSize(2, 8)
    assert size.decide(pool_status(2), 0) == 2
    assert size.decide(pool_status(2, playing=1, kept=1), 1) == 3
    assert size.decide(pool_status(3, playing=3, waiting=2), 2) == 6
    assert size.decide(pool_status(6, playing=6, waiting=50), 3) == 8


def test_unneeded_actors_go_but_never_those_of_a_conversation() -> None:
    size, end = PoolSize(2, 8), SPARE_SECONDS
    assert size.decide(pool_status(8, kept=1, last=5), 0) == 8
    assert size.decide(pool_status(8, playing=7, kept=1), 1) == 8, "they are needed again"
    assert size.decide(pool_status(8, kept=1, last=5), 2) == 8
    assert size.decide(pool_status(8, kept=1, last=5), 1 + end) == 8, "the time begins anew"
    assert size.decide(pool_status(8, kept=1, last=5), 2 + end) == 5
    assert size.decide(pool_status(5), 3 + end) == 5
    assert size.decide(pool_status(5), 63 + end) == 2
