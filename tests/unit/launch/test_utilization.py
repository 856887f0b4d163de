from __future__ import annotations

import pytest

from actors.rollouts.fleet_report import FleetStatus
from launch.training.update_report import utilization_metrics
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
    first = fleet(8.0, 100.0), queue(5, a=(50.0, 40.0, 0))
    second = fleet(18.0, 110.0, 4, 1, 3), queue(7, a=(60.0, 42.0, 3))
    found = utilization_metrics(first, second)
    assert found["time/fleet_idle"] == pytest.approx(1 - 10 / 40)
    assert found["time/engine_idle"] == pytest.approx(0.8)
    assert found["stream/wasted_tokens_unwanted"] == 5
    assert found["stream/wasted_tokens_replayed"] == 4
    assert (found["stream/retries"], found["stream/resumed_turns"]) == (1, 3)
    # The engine was replaced: the new one counts from 0, and is looked at from the next time on.
    found = utilization_metrics(second, (fleet(18.0, 130.0, 4, 1, 3), queue(7, b=(1.0, 1.0, 9))))
    assert found["time/fleet_idle"] == 1.0
    assert found["time/engine_idle"] == 0.0
    assert found["stream/wasted_tokens_unwanted"] == 0
    assert found["stream/wasted_tokens_replayed"] == 0


def test_sampling_actor_that_was_started_anew_has_wasted_nothing() -> None:
    found = utilization_metrics((fleet(0.0), queue(7)), (fleet(0.0), queue(2)))
    assert found["stream/wasted_tokens_unwanted"] == 0
