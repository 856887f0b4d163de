"""Training samples for the tests of the learner: ragged, with holes where an environment has spoken."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.learning.samples import TrainBatch, TrainingSample

if TYPE_CHECKING:
    from actors.learning.learner_group import LearnerGroup

MakeLearner = Callable[..., "LearnerGroup"]
MakeRank = Callable[..., Any]
"""Types of the fixtures ``make_learner`` and ``make_rank``."""
RESPONSE_TOKENS = 160
"""Most tokens of a response in the tests of the learner."""


def save(rank: Any, folder: Path | str) -> None:
    """Have one of the ranks of a learner save a checkpoint, without an actor."""
    import torch.distributed as dist

    rank.begin_save(str(folder))()
    dist.barrier()  # the export reads what all have written
    rank.export(str(folder))


def ragged_samples(number: int = 7, seed: int = 0, most: int = 60) -> tuple[TrainingSample, ...]:
    """Samples with one advantage each; the engine's log-probabilities are -5."""
    rng = random.Random(seed)
    samples = []
    for index in range(number):
        size = rng.randint(most // 4, most)
        mask = tuple(int(position % 10 < 7) for position in range(size))
        prompt_ids = tuple(rng.randrange(300) for _ in range(rng.randint(5, 60)))
        response_ids = tuple(rng.randrange(300) for _ in range(size))
        advantage = rng.choice([-1.5, 0.5, 2.0])
        samples.append(
            TrainingSample(
                sample_id=str(index),
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                loss_mask=mask,
                rollout_logprobs=tuple(-5.0 * bit for bit in mask),
                turns=tuple(position // 10 if bit else -1 for position, bit in enumerate(mask)),
                advantages=tuple(advantage * bit for bit in mask),
            )
        )
    return tuple(samples)


def num_rows(samples: Iterable[TrainingSample], most: int = 4096) -> int:
    """Rows in which the learner of a tiny model computes them, each of ``most`` tokens: where there are fewer
    than samples, they are trees."""
    from policies.learning.rows import plan_rows

    return len(plan_rows([sample.prompt_ids + sample.response_ids for sample in samples], most, 384))


def with_random_columns(samples: Sequence[TrainingSample], seed: int = 0) -> tuple[TrainingSample, ...]:
    """The samples with every other column filled; the reference policy is up to 8 nats away."""
    rng = random.Random(seed)

    def column(sample: TrainingSample, low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) * bit for bit in sample.loss_mask)

    filled = []
    for sample in samples:
        old_logprobs = column(sample, -6.0, -4.0)
        filled.append(
            replace(
                sample,
                advantages=column(sample, -2.0, 2.0),
                old_logprobs=old_logprobs,
                reference_logprobs=tuple(
                    value + offset
                    for value, offset in zip(old_logprobs, column(sample, -8.0, 8.0), strict=True)
                ),
                values=column(sample, -1.0, 1.0),
                returns=column(sample, -1.0, 1.0),
            )
        )
    return tuple(filled)


def batches(number: int = 2, size: int = 4) -> list[TrainBatch]:
    """The mini-batches of one update."""
    return [TrainBatch(samples=ragged_samples(size, seed)) for seed in range(number)]
