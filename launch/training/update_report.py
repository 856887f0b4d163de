"""The report of a policy update, whichever stage of training has made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import ActorUnavailableError

from actors.rollouts.fleet_report import FleetStatus
from actors.rollouts.scaling import Load, ScalingPolicy
from actors.rollouts.service import RolloutService
from launch.reporting import metrics
from launch.reporting.tracker import Tracker
from launch.settings.tree import TrainConfig
from launch.training.activity import Clock
from launch.training.run_state import RunState
from launch.training.selection import Selection
from policies.sampler import QueueStatus

Counts = tuple[FleetStatus, QueueStatus]
"""Counts of fleet and engines at one moment."""


class UpdateReport:
    """Records updates, and has as many rollout actors as their metrics call for.

    Args:
        service: the training's; ``None`` in a replay.
    """

    def __init__(
        self, config: TrainConfig, state: RunState, tracker: Tracker, service: RolloutService | None
    ) -> None:
        self._config, self._state, self._tracker, self._service = config, state, tracker, service
        self._counts: Counts | None = None
        self._references: list[ray.ObjectRef] = []
        self._scaling = ScalingPolicy(*config.fleet.bounds)

    def begin(self) -> None:
        """Count the work of fleet and engines from here on."""
        self.request_counts()
        self._utilization()

    def request_counts(self) -> None:
        """Request the counts of fleet and engines: once an update, when they are busy."""
        if self._service is not None:
            self._references = self._service.request_status()

    def _utilization(self) -> dict[str, float]:
        """Metrics of fleet and engines since the counts before; none while Ray starts an actor anew."""
        if self._service is None:
            return {}
        before = self._counts
        try:
            self._counts = self._service.status(self._references)
        except ActorUnavailableError:
            self._counts = None
        return utilization_metrics(before, self._counts) if before and self._counts else {}

    def record(self, version: int, selection: Selection, learning: dict[str, float], clock: Clock) -> None:
        """Record the newest update.

        Args:
            version: of the policy that learned.
            selection: the groups that the update was made of.
            learning: metrics of the learner.
            clock: started with the update.
        """
        if alarm := metrics.mismatch_alarm(learning, self._config.learner.mismatch_alarm):
            self._tracker.alarm(alarm)
        played = selection.taken
        if change := self._state.note_judge("rollout", played):
            self._tracker.announce(change)
        numbers = {
            **metrics.rollout_metrics(played),
            **metrics.staleness_metrics(selection.groups, version, self._config.rollout.max_staleness),
            **metrics.token_metrics(selection.useful, selection.unused, selection.not_imitated),
            **learning,
            **metrics.time_metrics(clock.seconds, clock.total),
            **self._utilization(),
        }
        histograms: dict[str, Sequence[float]] = {
            "stream/staleness": metrics.staleness(selection.groups, version),
            "rollout/reward": [each.reward for group in played for each in group.trajectories],
        }
        self._tracker.step(self._state.progress.step, numbers, histograms, played)
        if self._service is not None and "stream/actors" in numbers:
            self._scale(self._service, numbers)

    def _scale(self, service: RolloutService, numbers: Mapping[str, float]) -> None:
        """Have as many rollout actors as the update's metrics call for, and announce a change."""
        load = Load(
            learner_waits=numbers["time/wait"] / numbers["time/step"],
            actors_idle=numbers["time/fleet_idle"],
            requests_waiting=numbers["time/requests_waiting"],
            num_actors=int(numbers["stream/actors"]),
            num_ready=int(numbers["time/actors_ready"]),
        )
        number = self._scaling.decide(load)
        if number != load.num_actors:
            service.resize(number)
            self._tracker.announce(
                f"Rollout actors: {load.num_actors} -> {number}. The learner waited for "
                f"{load.learner_waits:.0%} of the update, {load.requests_waiting:.1f} requests for an actor; "
                f"actors were idle for {load.actors_idle:.0%}."
            )


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
        "time/fleet_idle": metrics.idle_share(played, seconds * fleet.num_actors),
        "time/engine_idle": metrics.idle_share(busy, there),
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
