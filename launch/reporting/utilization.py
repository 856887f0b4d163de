"""Utilization of fleet and engines, as shares of the time between two readings."""

from __future__ import annotations

from actors.rollouts.fleet_report import FleetStatus
from launch.reporting.metrics import idle_share
from policies.sampler import QueueStatus

Counts = tuple[FleetStatus, QueueStatus]
"""Counts of fleet and engines at one moment."""


def utilization_metrics(last: Counts, now: Counts) -> dict[str, float]:
    """Idle shares of the rollout actors and the engines between two moments, and tokens that were sampled for
    rollouts that were played again or not used.

    An engine that is new since then, or is gone, counts for nothing: its counters begin at 0, and it is
    unknown when it stopped working.
    """
    (fleet_before, queue_before), (fleet, queue) = last, now
    engines = [
        (replica.engine, queue_before.replicas[name].engine)
        for name, replica in queue.replicas.items()
        if replica.is_live and name in queue_before.replicas
    ]
    busy = sum(after.busy_seconds - before.busy_seconds for after, before in engines)
    there = sum(after.seconds - before.seconds for after, before in engines)
    seconds, played = fleet.seconds - fleet_before.seconds, fleet.busy_seconds - fleet_before.busy_seconds
    return {
        "time/fleet_idle": idle_share(played, seconds * fleet.num_actors),
        "time/engine_idle": idle_share(busy, there),
        "stream/actors": fleet.num_actors,
        "time/actors_ready": fleet.num_ready,
        "time/requests_waiting": (fleet.waited_seconds - fleet_before.waited_seconds) / max(1e-9, seconds),
        "stream/retries": fleet.num_retries - fleet_before.num_retries,
        "stream/resumed_turns": fleet.num_resumed_turns - fleet_before.num_resumed_turns,
        "stream/wasted_tokens_replayed": fleet.num_replayed_tokens - fleet_before.num_replayed_tokens,
        # A sampling actor that was started anew counts from 0.
        "stream/wasted_tokens_unwanted": max(0, queue.num_late_tokens - queue_before.num_late_tokens)
        + sum(after.num_aborted_tokens - before.num_aborted_tokens for after, before in engines),
    }
