from __future__ import annotations

import pytest

from actors.rollouts.fleet_report import FleetStatus
from launch.reporting.utilization import CountDifference
from policies.sampler import EngineStats, QueueStatus, ReplicaStatus


def fleet(
    busy_seconds: float,
    seconds: float = 0.0,
    num_replayed_tokens: int = 0,
    num_retries: int = 0,
    num_resumed_turns: int = 0,
) -> FleetStatus:
    return FleetStatus(
        num_actors=4,
        num_ready=4,
        num_waiting=0,
        num_running=0,
        num_lost=0,
        busy_seconds=busy_seconds,
        seconds=seconds,
        num_replayed_tokens=num_replayed_tokens,
        num_retries=num_retries,
        num_resumed_turns=num_resumed_turns,
    )


def queue(num_late_tokens: int, is_live: bool = True, **engines: tuple[float, float, int]) -> QueueStatus:
    return QueueStatus(
        num_waiting=0,
        num_late_tokens=num_late_tokens,
        replicas={
            name: ReplicaStatus(
                version=1,
                is_live=is_live,
                num_running=0,
                num_answered=0,
                engine=EngineStats(seconds=seconds, busy_seconds=busy, num_aborted_tokens=aborted),
            )
            for name, (seconds, busy, aborted) in engines.items()
        },
    )


def test_shares_are_of_the_time_since_the_last_look() -> None:
    utilization = CountDifference()
    assert utilization.since_last(fleet(8.0, 100.0), queue(5, a=(50.0, 40.0, 0))) == {}
    second = utilization.since_last(fleet(18.0, 110.0, 4, 1, 3), queue(7, a=(60.0, 42.0, 3)))
    assert second["time/fleet_idle"] == pytest.approx(1 - 10 / 40)
    assert second["time/engine_idle"] == pytest.approx(0.8)
    assert second["stream/wasted_tokens_unwanted"] == 5
    assert second["stream/wasted_tokens_replayed"] == 4
    assert (second["stream/retries"], second["stream/resumed_turns"]) == (1, 3)
    # The engine was replaced: the new one counts from 0, and is looked at from the next time on.
    third = utilization.since_last(fleet(18.0, 130.0, 4, 1, 3), queue(7, b=(1.0, 1.0, 9)))
    assert third["time/fleet_idle"] == 1.0
    assert third["time/engine_idle"] == 0.0
    assert third["stream/wasted_tokens_unwanted"] == 0
    assert third["stream/wasted_tokens_replayed"] == 0


def test_sampling_actor_that_was_started_anew_has_wasted_nothing() -> None:
    utilization = CountDifference()
    utilization.since_last(fleet(0.0), queue(7))
    assert utilization.since_last(fleet(0.0), queue(2))["stream/wasted_tokens_unwanted"] == 0
