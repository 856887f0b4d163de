"""The mini-batches of one update."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from environments.types import Trajectory
from launch.settings.tree import TrainConfig
from policies.learning.samples import TrainBatch, TrainingSample, samples_by_policy


def make_batches(config: TrainConfig, trajectories: Iterable[Trajectory], name: str) -> list[TrainBatch]:
    """The mini-batches that ``trajectories`` make, each of the samples of one policy.

    They are shuffled and split evenly into about ``learner.mini_batch_size`` each. All sequences of a
    trajectory that a policy has sampled stay in one mini-batch.

    Args:
        name: of the shuffle: equal names of one run shuffle alike, so that a resumed run agrees.
    """
    by_policy: dict[str, list[list[TrainingSample]]] = defaultdict(list)
    for trajectory in trajectories:
        for policy, samples in samples_by_policy(trajectory).items():
            by_policy[policy].append(samples)
    batches = []
    for policy, rows in by_policy.items():
        random.Random(f"{config.seed}/{name}").shuffle(rows)
        count = max(1, round(len(rows) / config.learner.mini_batch_size))
        batches += [
            TrainBatch(
                samples=tuple(sample for samples in part for sample in samples),
                temperature=config.rollout.temperature,
                policy=policy,
            )
            for part in (rows[index::count] for index in range(count))
            if part
        ]
    return batches


def in_epochs(config: TrainConfig, batches: Sequence[TrainBatch], name: str) -> list[TrainBatch]:
    """The mini-batches of an update as often as ``learner.num_epochs`` says: one pass after the other.

    The first pass has the order of ``batches``, each further one an order of its own.

    Args:
        name: of the update: equal names of one run give equal orders, so that a resumed run agrees.
    """
    taken = list(batches)
    for epoch in range(1, config.learner.num_epochs):
        taken += random.Random(f"{config.seed}/{name}/{epoch}").sample(batches, len(batches))
    return taken
