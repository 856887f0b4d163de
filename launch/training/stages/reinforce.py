"""The stage ``reinforce``: reinforcement learning by the algorithm of the configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from actors.learning.learners import Learners, merged_metrics
from environments.types import TrajectoryGroup
from launch.training.activity import Clock
from launch.training.components import Components, UpdateParts
from launch.training.mini_batches import in_epochs, make_batches
from launch.training.selection import Selection
from launch.training.stages.policy_update import PolicyUpdateStage, PreparedUpdate
from policies.learning.algorithm import Algorithm
from policies.learning.credit import assign_credit
from policies.learning.kl import KLController
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample
from policies.learning.settings import OptimizerConfig


class Reinforce(PolicyUpdateStage):
    """Makes ``run.num_steps`` updates of the policy, from groups to published weights."""

    name = "reinforce"

    @property
    def num_steps(self) -> int:
        return self.config.run.num_steps

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.config.learner.optimizer

    def prepare(
        self, parts: UpdateParts, selection: Selection, step: int, version: int, clock: Clock
    ) -> PreparedUpdate:
        config = self.config
        with clock.measure("time/score"):
            rollouts = (each for group in selection.useful for each in group.trajectories)
            batches = make_batches(config, rollouts, f"batches/{step}")
            batches = parts.learner.score(batches) if batches else []
            # Without staleness all rollouts are fresh, and the update itself finds the difference.
            metrics = parts.comparison.before_update(version, batches) if config.rollout.max_staleness else {}
        with clock.measure("time/credit"):
            batches, credit = with_credit(parts.algorithm, parts.kl, selection.groups, batches)
        return PreparedUpdate(batches=batches, metrics=metrics | credit, kl_coef=parts.kl.coef)

    def learn(self, learner: Learners, batches: Sequence[TrainBatch], step: int) -> LearnerUpdate:
        return learner.update(in_epochs(self.config, batches, f"epochs/{step}"))

    def finish(
        self, run: Components, selection: Selection, learned: LearnerUpdate, version: int
    ) -> dict[str, float]:
        if not self.config.rollout.max_staleness:
            return run.comparison.after_update(learned)
        if learned.num_optimizer_steps:
            run.comparison.begin_probe(selection.groups, version)
        return {}


def with_credit(
    algorithm: Algorithm, kl: KLController, groups: Sequence[TrajectoryGroup], batches: Sequence[TrainBatch]
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The scored batches with advantages, over all samples of a policy at once, and the metrics of these."""
    if not batches:
        return [], {}
    by_policy: dict[str, dict[str, list[TrainingSample]]] = {}
    for batch in batches:
        samples = by_policy.setdefault(batch.policy, defaultdict(list))
        for sample in batch.samples:
            samples[sample.rollout_id].append(sample)
    metrics: dict[str, dict[str, float]] = {}
    by_id: dict[str, TrainingSample] = {}
    for policy, samples in by_policy.items():
        credited, metrics[policy] = assign_credit(groups, samples, algorithm, kl.coef)
        by_id |= {sample.sample_id: sample for each in credited.values() for sample in each}
    credit = merged_metrics(metrics)
    numbers = credit | kl.update(credit, len({name for samples in by_policy.values() for name in samples}))
    return [
        replace(batch, samples=tuple(by_id[sample.sample_id] for sample in batch.samples))
        for batch in batches
    ], numbers
