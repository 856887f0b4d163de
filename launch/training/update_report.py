"""What an update of the policy reports, whichever stage of training has made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.rollouts.scaling import Load
from launch.reporting import metrics
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.run_state import RunState
from launch.training.selection import Selection


def report_update(
    run: Components,
    state: RunState,
    version: int,
    selection: Selection,
    learning: dict[str, float],
    clock: Clock,
) -> None:
    """Record the newest update.

    Args:
        version: of the policy that learned.
        selection: the groups that the update was made of.
        learning: metrics of the learner.
        clock: started with the update.
    """
    staleness = run.config.rollout.max_staleness
    if alarm := metrics.mismatch_alarm(learning, run.config.learner.mismatch_alarm):
        run.tracker.alarm(alarm)
    played = [*selection.groups, *selection.all_dropped]
    if change := state.note_judge("rollout", played):
        run.tracker.announce(change)
    numbers = {
        **metrics.rollout_metrics(played),
        **metrics.staleness_metrics(selection.groups, version, staleness),
        **metrics.token_metrics(selection.useful, selection.unused, selection.not_imitated),
        **learning,
        **metrics.time_metrics(clock.seconds, clock.total),
        **run.utilization.since_last(),
    }
    histograms: dict[str, Sequence[float]] = {
        "stream/staleness": metrics.staleness(selection.groups, version),
        "rollout/reward": [each.reward for group in played for each in group.trajectories],
    }
    run.tracker.step(state.progress.step, numbers, histograms)
    if "stream/actors" in numbers:
        scale(run, numbers)


def scale(run: Components, numbers: Mapping[str, float]) -> None:
    """Have as many rollout actors as the update's metrics ask for, and say so if that is another number."""
    load = Load(
        learner_waits=numbers["time/wait"] / numbers["time/step"],
        actors_idle=numbers["time/fleet_idle"],
        requests_waiting=numbers["time/requests_waiting"],
        num_actors=int(numbers["stream/actors"]),
        num_ready=int(numbers["time/actors_ready"]),
    )
    number = run.scaling.decide(load)
    if number != load.num_actors:
        run.rollouts.resize(number)
        run.tracker.announce(
            f"Rollout actors: {load.num_actors} -> {number}. The learner waited for {load.learner_waits:.0%} "
            f"of the update, {load.requests_waiting:.1f} requests for an actor; actors were idle for "
            f"{load.actors_idle:.0%}."
        )
