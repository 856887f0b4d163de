"""The stage ``expert_iteration``: sample, keep what succeeded, fine-tune on it, repeat.

Each iteration goes on from the policy of the one before, as in ReST (Gulcehre et al. 2023, section 3), and
not from the first model, as in STaR (Zelikman et al. 2022). It is the baseline that reinforcement has to beat
at equal rollouts, and may stand before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from actors.learning.learners import Learners
from environments.types import Trajectory
from launch.training.activity import Clock
from launch.training.components import UpdateParts
from launch.training.mini_batches import make_batches
from launch.training.selection import Selection
from launch.training.stages.base import SupervisedStage
from launch.training.stages.policy_update import PolicyUpdateStage, PreparedUpdate
from policies.learning.algorithm import Algorithm
from policies.learning.samples import LearnerUpdate, TrainBatch, is_judged


class ExpertIteration(SupervisedStage, PolicyUpdateStage):
    """Makes ``expert_iteration.num_steps`` updates by supervised learning on the policy's own successes."""

    name = "expert_iteration"

    @property
    def num_schedule_steps(self) -> int:
        """Optimizer steps if every rollout succeeded: with fewer, a cosine schedule stops before its end."""
        rollout = self.config.rollout
        num_rollouts = rollout.groups_per_step * rollout.group_size
        batches = max(1, math.ceil(num_rollouts / self.config.learner.mini_batch_size))
        return self.num_steps * self.config.expert_iteration.num_epochs * batches

    def selecting(self, algorithm: Algorithm) -> Algorithm:
        # A group in which all succeeded has nothing for a comparison, and much to imitate.
        return replace(algorithm, zero_signal_groups="keep")

    def prepare(
        self, parts: UpdateParts, selection: Selection, step: int, version: int, clock: Clock
    ) -> PreparedUpdate:
        with clock.measure("time/score"):
            batches = self._batches(self._successes(selection), step)
            imitated = {sample.rollout_id for batch in batches for sample in batch.samples}
            played = {each.rollout_id for group in selection.groups for each in group.trajectories}
            selection.not_imitated = frozenset(played - imitated)
            metrics = parts.comparison.before_update(version, batches)
        metrics["learn/num_imitated_trajectories"] = len(imitated)
        return PreparedUpdate(batches=batches, metrics=metrics)

    def learn(self, learner: Learners, batches: Sequence[TrainBatch], step: int) -> LearnerUpdate:
        return learner.fit(batches)

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
