"""The training loop: take groups from the feed, score them, learn, publish, and begin again."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ray.exceptions import RayError

from environments.errors import TroupeError
from environments.types import TrajectoryGroup
from launch.config import TrainConfig
from launch.reporting import metrics
from launch.training.run import Run
from launch.training.selection import REASONS, ZERO_SIGNAL, mask, reason_to_drop
from policies.learning.credit import assign_credit
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample, has_signal, training_samples

NOTHING_LEARNED = LearnerUpdate(metrics={}, num_optimizer_steps=0)
NUM_COMPARED = 8
"""Samples on which engine and learner are compared where nothing else has the learner score them."""
WARM_START_CHUNK = 5
"""Optimizer steps of the warm start between two chances to stop."""


def train(config: TrainConfig, run: Run) -> None:
    """Train the policy from where ``run.progress`` says to ``config.run.num_steps`` updates."""
    run.interrupts.raise_if_interrupted()
    warm_start(config, run)
    run.begin_rollouts()
    while True:
        run.interrupts.raise_if_interrupted()
        clock = Clock()
        evaluate_and_save(config, run, clock)
        if run.progress.step >= config.run.num_steps:
            return
        update(config, run, clock)


def update(config: TrainConfig, run: Run, clock: Clock) -> None:
    """One update of the policy, from groups to published weights."""
    progress = run.progress
    version = progress.version
    with clock.measure("time/wait"):
        selection = select_groups(config, run)
    run.ask_utilization()
    with clock.measure("time/score"):
        batches = make_batches(config, selection.useful, progress.step)
        batches = run.learner.score(batches) if batches else []
        learning = disagreement(config, run, batches)
    with clock.measure("time/credit"):
        batches, credit = with_credit(config, run, selection.groups, batches)
    with run.interrupts.atomic_section():  # the weights and what we say of them change together
        with clock.measure("time/learn"):
            # Where every group agreed with itself there is nothing to learn.
            learned = run.learner.update(batches) if batches else NOTHING_LEARNED
        progress.step += 1
        with clock.measure("time/publish"):
            if learned.num_optimizer_steps:  # else the weights are those that are served
                run.publish()
        run.commit(selection.groups, selection.dropped)
        if learned.num_optimizer_steps and config.rollout.max_staleness:  # at 0 all rollouts are fresh
            run.probe.begin(selection.groups, run.progress.version)
        learning |= credit | learned.metrics | {"learn/num_optimizer_steps": learned.num_optimizer_steps}
        report_update(config, run, selection, learning, clock, version)


def report_update(
    config: TrainConfig,
    run: Run,
    selection: Selection,
    learning: dict[str, float],
    clock: Clock,
    version: int,
) -> None:
    """Record an update that was made of ``selection``, by a learner that had ``version`` before."""
    if alarm := metrics.mismatch_alarm(learning, config.learner.mismatch_alarm):
        run.tracker.alarm(alarm)
    played = [*selection.groups, *selection.all_dropped]
    numbers = {
        **metrics.rollout_metrics(played),
        **metrics.staleness_metrics(selection.groups, version, config.rollout.max_staleness),
        **metrics.token_metrics(selection.useful, selection.unused),
        **learning,
        **metrics.time_metrics(clock.seconds, clock.total),
        **run.utilization(),
    }
    histograms: dict[str, Sequence[float]] = {
        "stream/staleness": metrics.staleness(selection.groups, version),
        "rollout/reward": [each.reward for group in played for each in group.trajectories],
    }
    run.tracker.step(run.progress.step, numbers, histograms)


# -- before the first update ---------------------------------------------------------------------------


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
        with run.interrupts.atomic_section():
            learned = run.learner.fit(batches)
            progress.warm_start_steps = last
            if last == settings.num_steps:
                run.learner.begin_phase(config.learner.optimizer, config.run.num_steps)
                run.publish()
        run.tracker.warm_start(last, settings.num_steps, learned.metrics)
        run.check_serving()


def demonstration_batch(
    demonstrations: Sequence[TrainingSample], batch_size: int, seed: int, step: int
) -> TrainBatch:
    """The demonstrations of one step: a function of seed and step alone, so that a resumed run agrees."""
    rng = random.Random(f"{seed}/warm start/{step}")
    return TrainBatch(samples=tuple(rng.sample(demonstrations, min(batch_size, len(demonstrations)))))


# -- what an update is made of -------------------------------------------------------------------------


@dataclass
class Selection:
    """The groups of one update, and those that were dropped on the way, by reason."""

    groups: list[TrajectoryGroup] = field(default_factory=list)
    zero_signal: list[TrajectoryGroup] = field(default_factory=list)
    """Those of ``groups`` without a signal, where the algorithm leaves them out and refills nothing."""
    dropped: dict[str, list[TrajectoryGroup]] = field(default_factory=lambda: {each: [] for each in REASONS})

    @property
    def useful(self) -> list[TrajectoryGroup]:
        """What is trained on."""
        zero_signal = {group.group_id for group in self.zero_signal}
        return [group for group in self.groups if group.group_id not in zero_signal]

    @property
    def unused(self) -> dict[str, list[TrajectoryGroup]]:
        """What is not trained on, by reason."""
        return self.dropped | {ZERO_SIGNAL: self.dropped[ZERO_SIGNAL] + self.zero_signal}

    @property
    def all_dropped(self) -> list[TrajectoryGroup]:
        return [group for groups in self.dropped.values() for group in groups]


def select_groups(config: TrainConfig, run: Run) -> Selection:
    """The next groups in the order of the tasks; another one is ordered for each that is dropped.

    Raises:
        TroupeError: one rollout after the other has failed, and not a single one succeeded.
    """
    selection = Selection()
    wanted, max_dropped = config.rollout.groups_per_step, config.selection.max_dropped
    num_taken = 0
    while len(selection.groups) < wanted and num_taken < wanted + max_dropped:
        group = run.feed.take()
        num_taken += 1
        mask(group, config.selection.masked_reasons)
        reason = reason_to_drop(group, run.progress.version, config, run.algorithm)
        if reason is None:
            selection.groups.append(group)
            if run.algorithm.zero_signal_groups == "drop" and not has_signal(group, run.algorithm):
                selection.zero_signal.append(group)
            continue
        selection.dropped[reason].append(group)
        check_any_succeeded(selection, wanted)  # here too: with many to drop, the end is far
        if len(selection.all_dropped) <= max_dropped:  # later ones keep their slots: nothing behind them ages
            run.feed.drop()
            run.request_rollouts(num_selected=len(selection.groups))
    check_any_succeeded(selection, wanted)
    if len(selection.groups) < wanted:
        run.tracker.announce(
            f"selection.max_dropped={max_dropped} groups were replaced for step {run.progress.step + 1}, and "
            f"more were dropped: it makes do with {len(selection.groups)} of {wanted} groups."
        )
    run.tracker.failures([*selection.groups, *selection.all_dropped])
    return selection


def check_any_succeeded(selection: Selection, wanted: int) -> None:
    """Raise ``TroupeError`` when not one rollout of a whole update's worth of groups came to its end."""
    groups = [*selection.groups, *selection.all_dropped]
    trajectories = [each for group in groups for each in group.trajectories]
    if len(groups) < wanted or not all(map(metrics.has_failed, trajectories)):
        return
    raise TroupeError(f"All of {len(trajectories)} rollouts failed. The first: {trajectories[0].error}")


def make_batches(config: TrainConfig, groups: Sequence[TrajectoryGroup], step: int) -> list[TrainBatch]:
    """The mini-batches of one update.

    Trajectories are shuffled and split evenly into about ``learner.mini_batch_size`` each. All sequences
    of a trajectory stay in one mini-batch.
    """
    rows = [
        samples
        for group in groups
        for trajectory in group.trajectories
        if (samples := training_samples(trajectory))
    ]
    random.Random(f"{config.seed}/batches/{step}").shuffle(rows)
    count = max(1, round(len(rows) / config.learner.mini_batch_size))
    return [
        TrainBatch(
            samples=tuple(sample for samples in part for sample in samples),
            temperature=config.rollout.temperature,
        )
        for part in (rows[index::count] for index in range(count))
        if part
    ]


def disagreement(config: TrainConfig, run: Run, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """How far engine and learner are apart on what the newest weights have sampled, if that is known."""
    version = run.progress.version
    fresh = [sample for batch in batches for sample in batch.samples if sample.policy_version == version]
    if run.algorithm.bypass:  # there the old log-probabilities are the engine's own
        fresh = with_own_logprobs(config, run, fresh[:NUM_COMPARED])
    return metrics.mismatch_metrics(fresh or with_own_logprobs(config, run, probed(run)), version)


def probed(run: Run) -> list[TrainingSample]:
    """What the engines were asked for after the last update, if they have answered."""
    version = run.progress.version
    try:
        return run.probe.take(version)
    except RayError as error:  # the rollouts live without it
        last = str(error).strip().splitlines()[-1]
        run.tracker.announce(f"Engine and learner were not compared under version {version}: {last}")
        return []


def with_own_logprobs(
    config: TrainConfig, run: Run, samples: Sequence[TrainingSample]
) -> list[TrainingSample]:
    """The samples with the learner's log-probabilities."""
    if not samples:
        return []
    rows = run.learner.logprobs(TrainBatch(samples=tuple(samples), temperature=config.rollout.temperature))
    return [replace(sample, old_logprobs=tuple(row)) for sample, row in zip(samples, rows, strict=True)]


def with_credit(
    config: TrainConfig, run: Run, groups: Sequence[TrajectoryGroup], batches: Sequence[TrainBatch]
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The scored batches with advantages, over all of them at once, and what is worth knowing of them."""
    if not batches:
        return [], {}
    samples: dict[str, list[TrainingSample]] = defaultdict(list)
    for batch in batches:
        for sample in batch.samples:
            samples[sample.rollout_id].append(sample)
    credited, credit = assign_credit(groups, samples, run.algorithm, run.kl.coef)
    by_id = {sample.sample_id: sample for each in credited.values() for sample in each}
    numbers = credit | run.kl.update(credit, len(samples))
    return [
        replace(batch, samples=tuple(by_id[sample.sample_id] for sample in batch.samples))
        for batch in batches
    ], numbers


# -- between two updates -------------------------------------------------------------------------------


def evaluate_and_save(config: TrainConfig, run: Run, clock: Clock) -> None:
    """What is due after as many updates as there were: an evaluation, a checkpoint."""
    step, last = run.progress.step, run.progress.step >= config.run.num_steps
    evaluation_due = run.evaluation_due()
    checkpoint_due = run.checkpoint_due() or (evaluation_due and config.run.best_metric is not None)
    evaluation = None
    with clock.measure("time/evaluate"):
        # A checkpoint has to know how the evaluations before it came out.
        run.record_evaluation(run.evaluator.collect(wait=evaluation_due or checkpoint_due))
        if evaluation_due:
            run.evaluator.begin(step, run.progress.version)
            evaluation = run.evaluator.collect(wait=last)
    with clock.measure("time/checkpoint"):
        if checkpoint_due:
            run.save_checkpoint()
    run.record_evaluation(evaluation)


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
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
