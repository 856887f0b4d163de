"""The report of a policy update, whichever stage of training has made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import ActorUnavailableError

from actors.rollouts.scaling import Load, ScalingPolicy
from actors.rollouts.service import RolloutService
from launch.reporting import metrics
from launch.reporting.tracker import Tracker
from launch.reporting.utilization import Counts, utilization_metrics
from launch.settings.tree import TrainConfig
from launch.training.clock import Clock
from launch.training.run_state import RunState
from launch.training.selection import Selection


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
