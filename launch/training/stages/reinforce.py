"""The stage ``reinforce``: reinforcement learning by the algorithm of the configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from environments.types import TrajectoryGroup
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.mini_batches import in_epochs, make_batches
from launch.training.run_state import RunState
from launch.training.selection import select_groups
from launch.training.stages.base import Stage, publish
from policies.learning.algorithm import Algorithm
from policies.learning.credit import assign_credit
from policies.learning.kl import KLController
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample
from policies.learning.settings import OptimizerConfig

NOTHING_LEARNED = LearnerUpdate(metrics={}, num_optimizer_steps=0)


class Reinforce(Stage):
    """Makes ``run.num_steps`` updates of the policy, from groups to published weights."""

    name = "reinforce"
    rolls_out = True

    @property
    def num_steps(self) -> int:
        return self.config.run.num_steps

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.config.learner.optimizer

    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        config, progress = self.config, state.progress
        version = progress.version
        with clock.measure("time/wait"):
            selection = select_groups(config, run.algorithm, run.rollouts, version, run.tracker)
        run.report.request_counts()
        with clock.measure("time/score"):
            rollouts = (each for group in selection.useful for each in group.trajectories)
            batches = make_batches(config, rollouts, f"batches/{progress.step}")
            batches = run.learner.score(batches) if batches else []
            # Without staleness all rollouts are fresh, and the update itself finds the difference.
            learning = run.comparison.before_update(version, batches) if config.rollout.max_staleness else {}
        with clock.measure("time/credit"):
            batches, credit = with_credit(run.algorithm, run.kl, selection.groups, batches)
            taken = in_epochs(config, batches, f"epochs/{progress.step}")
        with run.interrupts.atomic_section():  # the weights and what we say of them change together
            with clock.measure("time/learn"):
                # Where every group agreed with itself there is nothing to learn.
                learned = run.learner.update(taken) if taken else NOTHING_LEARNED
            with clock.measure("time/publish"):
                if learned.num_optimizer_steps:  # else the weights are those that are served
                    publish(run, state)
            progress.step += 1
            self.count_steps(state)
            progress.kl_coef = run.kl.coef
            state.record_consumed(selection.groups, selection.dropped)
            state.trajectories.record_update(
                progress.step, selection.useful, selection.unused, turn_advantages(batches)
            )
            run.rollouts.commit()
            if not config.rollout.max_staleness:
                learning |= run.comparison.after_update(learned)
            elif learned.num_optimizer_steps:
                run.comparison.begin_probe(selection.groups, progress.version)
            learning |= credit | learned.metrics | {"learn/num_optimizer_steps": learned.num_optimizer_steps}
            run.report.record(version, selection, learning, clock)


def with_credit(
    algorithm: Algorithm,
    kl: KLController,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[TrainBatch],
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The scored batches with advantages, over all of them at once, and the metrics of the advantages."""
    if not batches:
        return [], {}
    samples: dict[str, list[TrainingSample]] = defaultdict(list)
    for batch in batches:
        for sample in batch.samples:
            samples[sample.rollout_id].append(sample)
    credited, credit = assign_credit(groups, samples, algorithm, kl.coef)
    by_id = {sample.sample_id: sample for each in credited.values() for sample in each}
    numbers = credit | kl.update(credit, len(samples))
    return [
        replace(batch, samples=tuple(by_id[sample.sample_id] for sample in batch.samples))
        for batch in batches
    ], numbers


def turn_advantages(batches: Sequence[TrainBatch]) -> dict[str, list[float]]:
    """The mean advantage of every turn that was learned from, by rollout."""
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for batch in batches:
        for sample in batch.samples:
            # Without advantages where all of it was masked.
            for turn, advantage in zip(sample.turns, sample.advantages, strict=bool(sample.advantages)):
                if turn >= 0:
                    values[sample.rollout_id][turn].append(advantage)
    return {
        rollout_id: [sum(turns[turn]) / len(turns[turn]) for turn in sorted(turns)]
        for rollout_id, turns in values.items()
    }
