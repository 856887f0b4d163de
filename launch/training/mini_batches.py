"""The mini-batches of one update."""

from __future__ import annotations

import random
from collections.abc import Iterable

from environments.types import Trajectory
from launch.config import TrainConfig
from policies.learning.samples import TrainBatch, training_samples


def make_batches(config: TrainConfig, trajectories: Iterable[Trajectory], name: str) -> list[TrainBatch]:
    """The mini-batches that ``trajectories`` make.

    They are shuffled and split evenly into about ``learner.mini_batch_size`` each. All sequences of a
    trajectory stay in one mini-batch.

    Args:
        name: of the shuffle: equal names of one run shuffle alike, so that a resumed run agrees.
    """
    rows = [samples for trajectory in trajectories if (samples := training_samples(trajectory))]
    random.Random(f"{config.seed}/{name}").shuffle(rows)
    count = max(1, round(len(rows) / config.learner.mini_batch_size))
    return [
        TrainBatch(
            samples=tuple(sample for samples in part for sample in samples),
            temperature=config.rollout.temperature,
        )
        for part in (rows[index::count] for index in range(count))
        if part
    ]
