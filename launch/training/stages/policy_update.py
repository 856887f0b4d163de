"""Stages whose steps are policy updates: from groups of rollouts to published weights.

A step is cut into ``prepare`` and ``learn`` for ``launch.replay``: by the same two it computes an update of a
run again, from the groups that the run has kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from actors.learning.learners import Learners
from environments.columns import stored
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.training.activity import Clock
from launch.training.components import Components, UpdateParts
from launch.training.run_state import RunState
from launch.training.selection import Selection, select_groups
from launch.training.stages.base import HasProgress, Stage, publish
from policies.learning.algorithm import Algorithm
from policies.learning.samples import LearnerUpdate, TrainBatch


@dataclass(frozen=True, kw_only=True)
class PreparedUpdate:
    """An update that has only to be learned."""

    batches: Sequence[TrainBatch]
    """The mini-batches; none where there is nothing to learn."""
    metrics: dict[str, float] = field(default_factory=dict)
    kl_coef: float | None = None
    """Weight of the KL penalty after this update; ``None`` where the stage has no such penalty."""

    def metrics_with(self, learned: LearnerUpdate) -> dict[str, float]:
        """Metrics of the update when ``learned`` has come of it."""
        counted = {"learn/num_optimizer_steps": learned.num_optimizer_steps}
        return self.metrics | learned.metrics | counted


class PolicyUpdateStage(Stage):
    """A stage that rolls out, and learns from the groups of each update."""

    rolls_out = True

    def selecting(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm by which groups are chosen: the run's."""
        return algorithm

    @abstractmethod
    def prepare(
        self, parts: UpdateParts, selection: Selection, step: int, version: int, clock: Clock
    ) -> PreparedUpdate:
        """Make the mini-batches of an update.

        Args:
            step: updates before this one.
            version: of the policy that learns.
        """

    @abstractmethod
    def learn(self, learner: Learners, batches: Sequence[TrainBatch], step: int) -> LearnerUpdate:
        """Learn the mini-batches that ``prepare`` has made, one at least.

        Args:
            step: updates before this one.
        """

    def finish(
        self, run: Components, selection: Selection, learned: LearnerUpdate, version: int
    ) -> dict[str, float]:
        """Do what is left when the update has been published as ``version``; return metrics of it."""
        return {}

    def count_update(self, state: HasProgress, prepared: PreparedUpdate) -> None:
        """Take note that one more update is done."""
        state.progress.step += 1
        self.count_steps(state)
        if prepared.kl_coef is not None:
            state.progress.kl_coef = prepared.kl_coef

    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        progress = state.progress
        version, step = progress.version, progress.step
        with clock.measure("time/wait"):
            selecting = self.selecting(run.algorithm)
            selection = select_groups(self.config, selecting, run.rollouts, version, run.tracker)
        run.report.request_counts()
        prepared = self.prepare(run, selection, step, version, clock)
        with run.interrupts.atomic_section():  # the weights and what we say of them change together
            with clock.measure("time/learn"):
                learned = learn(self, run.learner, prepared, step)
            with clock.measure("time/publish"):
                if learned.num_optimizer_steps:  # else the weights are those that are served
                    publish(run, state)
            self.count_update(state, prepared)
            state.record_consumed(selection.groups, selection.dropped)
            state.log_beside(partial(record, step=progress.step, selection=selection, prepared=prepared))
            metrics = prepared.metrics_with(learned) | run.rollouts.commit()
            metrics |= self.finish(run, selection, learned, progress.version)
            run.report.record(version, selection, metrics, clock)


def learn(stage: PolicyUpdateStage, learner: Learners, prepared: PreparedUpdate, step: int) -> LearnerUpdate:
    """Learn a prepared update: nothing, where every group agreed with itself or none succeeded."""
    if not prepared.batches:
        return LearnerUpdate(metrics={}, num_optimizer_steps=0)
    return stage.learn(learner, prepared.batches, step)


def record(log: TrajectoryLog, step: int, selection: Selection, prepared: PreparedUpdate) -> None:
    """Keep the trajectories of an update, and what was learned from them."""
    advantages = turn_advantages(prepared.batches)
    log.record_update(step, selection.useful, selection.unused, advantages, selection.not_imitated)


def turn_advantages(batches: Sequence[TrainBatch]) -> dict[str, list[float]]:
    """The mean advantage of every turn, by rollout: 0 of one that was not learned from there."""
    learned: dict[str, list[tuple[np.ndarray, ...]]] = defaultdict(list)
    for batch in batches:
        for sample in batch.samples:
            turns, advantages = (np.asarray(stored(sample, name)) for name in ("turns", "advantages"))
            if not len(advantages):  # all of it was masked, or imitated
                continue
            assert len(advantages) == len(turns)
            starts = np.flatnonzero(np.diff(turns, prepend=-2) != 0)  # each run of tokens is of one turn
            sums = np.add.reduceat(advantages, starts, dtype=float)
            learned[sample.rollout_id].append((turns[starts], sums, np.diff(starts, append=len(turns))))
    means = {}
    for rollout_id, parts in learned.items():
        turns, sums, counts = map(np.concatenate, zip(*parts, strict=True))
        sums, counts = (np.bincount(turns + 1, each)[1:] for each in (sums, counts))  # -1 is that of no turn
        if len(counts):
            means[rollout_id] = (sums / np.maximum(counts, 1)).tolist()
    return means
