"""The stage ``expert_iteration``: sample, keep what succeeded, fine-tune on it, repeat.

Each iteration goes on from the policy of the one before, as in ReST (Gulcehre et al. 2023, section 3), and
not from the first model, as in STaR (Zelikman et al. 2022). It is the baseline that reinforcement has to beat
at equal rollouts, and may stand before it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from environments.types import Trajectory
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.mini_batches import make_batches
from launch.training.run_state import RunState
from launch.training.selection import Selection, select_groups
from launch.training.stages.base import Stage, publish
from policies.learning.samples import LearnerUpdate, TrainBatch, is_judged
from policies.learning.settings import OptimizerConfig, phase_optimizer

NOTHING_LEARNED = LearnerUpdate(metrics={}, num_optimizer_steps=0)


class ExpertIteration(Stage):
    """Makes ``expert_iteration.num_steps`` updates by supervised learning on the policy's own successes."""

    name = "expert_iteration"
    rolls_out = True

    @property
    def num_steps(self) -> int:
        return self.config.expert_iteration.num_steps

    @property
    def optimizer(self) -> OptimizerConfig:
        return phase_optimizer("expert_iteration.optimizer", self.config.expert_iteration.optimizer)

    @property
    def num_schedule_steps(self) -> int:
        """Optimizer steps if every rollout succeeded: with fewer, a cosine schedule stops before its end."""
        rollout = self.config.rollout
        num_rollouts = rollout.groups_per_step * rollout.group_size
        batches = max(1, math.ceil(num_rollouts / self.config.learner.mini_batch_size))
        return self.num_steps * self.config.expert_iteration.num_epochs * batches

    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        progress = state.progress
        version = progress.version
        # A group in which all succeeded has nothing for a comparison, and much to imitate.
        algorithm = replace(run.algorithm, zero_signal_groups="keep")
        with clock.measure("time/wait"):
            selection = select_groups(self.config, algorithm, run.rollouts, version, run.tracker)
        run.report.request_counts()
        with clock.measure("time/score"):
            batches = self._batches(self._successes(selection), progress.step)
            imitated = {sample.rollout_id for batch in batches for sample in batch.samples}
            played = {each.rollout_id for group in selection.groups for each in group.trajectories}
            selection.not_imitated = frozenset(played - imitated)
            learning = run.comparison.before_update(version, batches)
        with run.interrupts.atomic_section():  # the weights and what we say of them change together
            with clock.measure("time/learn"):
                learned = run.learner.fit(batches) if batches else NOTHING_LEARNED
            with clock.measure("time/publish"):
                if learned.num_optimizer_steps:  # else the weights are those that are served
                    publish(run, state)
            progress.step += 1
            self.count_steps(state)
            state.record_consumed(selection.groups, selection.dropped)
            state.trajectories.record_update(
                progress.step, selection.groups, selection.dropped, {}, selection.not_imitated
            )
            run.rollouts.commit()
            learning |= learned.metrics | {
                "learn/num_optimizer_steps": learned.num_optimizer_steps,
                "learn/num_imitated_trajectories": len(imitated),
            }
            run.report.record(version, selection, learning, clock)

    def _successes(self, selection: Selection) -> list[Trajectory]:
        least = self.config.expert_iteration.min_reward
        rollouts = (each for group in selection.groups for each in group.trajectories)
        return [each for each in rollouts if is_judged(each) and not each.masked and each.reward >= least]

    def _batches(self, kept: list[Trajectory], step: int) -> list[TrainBatch]:
        epochs = range(self.config.expert_iteration.num_epochs)
        return [
            batch
            for epoch in epochs
            for batch in make_batches(self.config, kept, f"expert iteration/{step}/{epoch}")
            if batch.has_sampled_tokens
        ]
