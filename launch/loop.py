"""The training loop: take groups from the stream, learn from them, publish, and begin again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from environments.errors import TroupeError
from environments.types import TerminationReason, Trajectory, TrajectoryGroup
from launch.config import TrainConfig
from launch.orders import evaluation_orders, training_orders
from launch.run import Run
from policies.learning.advantages import samples_with_advantages
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample

WARM_START_CHUNK = 5
"""Optimizer steps of the warm start between two chances to stop."""


def train(config: TrainConfig, run: Run) -> None:
    """Train the policy from where ``run.progress`` says to ``config.run.num_steps`` updates."""
    progress = run.progress
    warm_start(config, run)
    run.wait_until_serving()
    if not progress.evaluated:
        evaluate(config, run)
        progress.evaluated = True
    run.tracker.begin_steps()
    while progress.step < config.run.num_steps:
        clock = Clock()
        with clock.measure("time/rollout"):
            groups = roll_out(config, run)
        with clock.measure("time/batch"):
            batches, metrics = make_batches(config, groups, progress.step)
        with run.interrupts.whole():  # the weights and what we say of them change together
            with clock.measure("time/learn"):
                metrics |= learn(run, batches)
            progress.step += 1
            progress.num_groups += len(groups)
            with clock.measure("time/publish"):
                run.publish()
        run.tracker.step(progress.step, metrics | clock.seconds | {"time/step": clock.total})
        if progress.step % config.run.checkpoint_every == 0:
            run.save_checkpoint()
        if config.evaluation.every and progress.step % config.evaluation.every == 0:
            evaluate(config, run)
    if not config.evaluation.every or progress.step % config.evaluation.every:
        evaluate(config, run)
    if progress.step % config.run.checkpoint_every:  # else the last step has written its own
        run.save_checkpoint()


def warm_start(config: TrainConfig, run: Run) -> None:
    """Supervised learning on demonstrations; then the policy is published and its optimizer made anew."""
    settings, progress = config.warm_start, run.progress
    if progress.warm_start_steps >= settings.num_steps:
        return
    demonstrations = run.demonstrations()
    run.tracker.announce(f"Warm start on {len(demonstrations)} demonstrations.")
    while progress.warm_start_steps < settings.num_steps:
        first = progress.warm_start_steps
        last = min(first + WARM_START_CHUNK, settings.num_steps)
        batches = [
            demonstration_batch(demonstrations, settings.batch_size, config.seed, step)
            for step in range(first, last)
        ]
        with run.interrupts.whole():
            update = run.learner.fit(batches)
            progress.warm_start_steps = last
            if last == settings.num_steps:
                run.learner.begin_phase(config.learner.optimizer, config.run.num_steps)
                run.publish()
        run.tracker.warm_start(last, settings.num_steps, update.metrics)
        run.check_serving()


def demonstration_batch(
    demonstrations: Sequence[TrainingSample], batch_size: int, seed: int, step: int
) -> TrainBatch:
    """The demonstrations of one step: a function of seed and step alone, so that a resumed run agrees."""
    rng = random.Random(f"{seed}/warm start/{step}")
    return TrainBatch(samples=tuple(rng.sample(demonstrations, min(batch_size, len(demonstrations)))))


def roll_out(config: TrainConfig, run: Run) -> list[TrajectoryGroup]:
    """One group per task, complete, in the order of the tasks."""
    orders = training_orders(config, run.workload.train_dataset, run.progress)
    groups = sorted(run.groups(orders), key=lambda group: group.group_id)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    errors = [each.error for each in trajectories if _failed(each)]
    if len(errors) == len(trajectories):
        raise TroupeError(f"All {len(errors)} rollouts of step {run.progress.step + 1} failed. {errors[0]}")
    if errors:
        run.tracker.announce(
            f"{len(errors)} of {len(trajectories)} rollouts failed, the first with: {errors[0]}"
        )
    return groups


def _failed(trajectory: Trajectory) -> bool:
    return trajectory.termination_reason is not None and trajectory.termination_reason.is_failure


def make_batches(
    config: TrainConfig, groups: Sequence[TrajectoryGroup], step: int
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The mini-batches of one update and the metrics of its rollouts.

    Trajectories are shuffled and split evenly into about ``learner.mini_batch_size`` each. All sequences
    of a trajectory stay in one mini-batch.
    """
    algorithm, learner = config.algorithm, config.learner
    rows = samples_with_advantages(groups, algorithm.advantage, algorithm.normalize_by_std)
    kept = [each for each in rows if each and (not algorithm.drop_zero_advantage or _has_signal(each))]
    random.Random(f"{config.seed}/batches/{step}").shuffle(kept)
    count = max(1, round(len(kept) / learner.mini_batch_size))
    parts = [kept[index::count] for index in range(count)]
    batches = [
        TrainBatch(
            samples=tuple(sample for each in part for sample in each), temperature=config.rollout.temperature
        )
        for part in parts
        if part
    ]
    return batches, rollout_metrics(groups) | {"rollout/kept_fraction": len(kept) / max(1, len(rows))}


def _has_signal(samples: Sequence[TrainingSample]) -> bool:
    return any(advantage for sample in samples for advantage in sample.advantages)


def learn(run: Run, batches: list[TrainBatch]) -> dict[str, float]:
    """Update the policy; where every group agreed with itself there is nothing to learn."""
    update = run.learner.update(batches) if batches else LearnerUpdate(metrics={}, num_optimizer_steps=0)
    return update.metrics | {"learn/num_optimizer_steps": update.num_optimizer_steps}


def evaluate(config: TrainConfig, run: Run) -> None:
    """Sampled success on the held-out tasks, one rollout each, under the published policy."""
    if run.workload.val_dataset is None:
        return
    clock = Clock()
    with clock.measure("time/evaluate"):
        groups = list(run.groups(evaluation_orders(config, run.workload.val_dataset, run.progress)))
    metrics = {name.replace("rollout/", "eval/"): value for name, value in rollout_metrics(groups).items()}
    run.tracker.evaluation(run.progress.step, metrics | clock.seconds | {"eval/num_tasks": len(groups)})


def rollout_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Rewards, lengths and endings of the trajectories."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    count = max(1, len(trajectories))
    completions = [
        step.completion for each in trajectories for step in each.steps if step.completion is not None
    ]
    reasons = Counter(each.termination_reason for each in trajectories)
    return {
        "rollout/reward_mean": sum(each.reward for each in trajectories) / count,
        "rollout/steps_mean": sum(len(each.steps) for each in trajectories) / count,
        "rollout/sampled_tokens": sum(len(each.completion_ids) for each in completions),
        "rollout/requests": len(completions),
        "rollout/seconds_mean": sum(each.seconds for each in trajectories) / count,
        **{f"rollout/ended_{reason}": reasons[reason] / count for reason in TerminationReason},
    }


class Clock:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
