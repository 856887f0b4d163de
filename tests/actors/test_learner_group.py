"""What an update does is the algorithm's formula, however the batch is padded, cut and spread over ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers_reference import load, token_logprobs, weights_of

from policies.learning.samples import TrainBatch, TrainingSample, padding_sample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from conftest import MakeLearner

pytestmark = pytest.mark.engine

FROZEN = OptimizerConfig(lr=0.0)
TWO_RANKS = LearnerConfig(num_workers=2, micro_batch_tokens=512)
"""Micro-batches so small that a rank needs several: they must not change anything either."""


def ragged_samples(number: int = 7) -> tuple[TrainingSample, ...]:
    """Different lengths, and masks with holes where an environment would have spoken."""
    rng = random.Random(0)
    samples = []
    for index in range(number):
        size = rng.randint(20, 150)
        mask = tuple(int(position % 10 < 7) for position in range(size))
        samples.append(
            TrainingSample(
                sample_id=str(index),
                prompt_ids=tuple(rng.randrange(300) for _ in range(rng.randint(5, 200))),
                response_ids=tuple(rng.randrange(300) for _ in range(size)),
                loss_mask=mask,
                rollout_logprobs=tuple(-5.0 * bit for bit in mask),
            ).with_advantages([rng.choice([-1.5, 0.5, 2.0])] * sum(mask))
        )
    return tuple(samples)


def batch_with_padding(rows: int, temperature: float = 1.0) -> TrainBatch:
    samples = ragged_samples() + (padding_sample(1),) * rows
    return TrainBatch(samples=samples, temperature=temperature)


def expected_grad_norm(model_path: Path, aggregation: str) -> float:
    """The policy gradient of the samples where the ratio is 1, by autograd alone."""
    model = load(model_path)
    losses, counts = [], []
    for sample in ragged_samples():
        mask = torch.tensor(sample.loss_mask)
        logprobs = token_logprobs(model, sample.prompt_ids, sample.response_ids, temperature=1.0)
        losses.append(-(torch.tensor(sample.advantages) * logprobs * mask).sum())
        counts.append(mask.sum())
    if aggregation == "token-mean":
        loss = sum(losses) / sum(counts)
    else:
        loss = sum(loss / count for loss, count in zip(losses, counts, strict=True)) / len(losses)
    loss.backward()
    return float(torch.stack([each.grad.norm() for each in model.parameters()]).norm())


# Token means come last: the learners that they leave behind are those that the other tests ask for.
@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
def test_the_gradient_is_the_formulas_whatever_the_padding_and_the_ranks(
    make_learner: MakeLearner, tiny_model: Path, aggregation: str
) -> None:
    expected = expected_grad_norm(tiny_model, aggregation)
    norms = []
    for settings in (LearnerConfig(), TWO_RANKS):
        learner = make_learner(settings, AlgorithmConfig(loss_aggregation=aggregation))
        learner.begin_phase(FROZEN, 100)
        for rows in (0, 1, 3):
            norms.append(learner.update([batch_with_padding(rows)]).metrics["learn/grad_norm"])
    assert norms == pytest.approx([norms[0]] * 6, rel=1e-5)
    assert norms[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_learning_rate_of_zero_leaves_ratio_and_weights_alone(
    make_learner: MakeLearner, tiny_model: Path, tmp_path: Path, temperature: float
) -> None:
    learner = make_learner()
    learner.begin_phase(FROZEN, 100)
    batch = batch_with_padding(0, temperature)
    before = learner.logprobs(batch)
    update = learner.update([batch, batch])  # the second would see what the first has done
    assert update.num_optimizer_steps == 2
    assert abs(update.metrics["learn/kl"]) < 1e-6
    assert update.metrics["learn/clip_fraction"] == 0
    assert update.metrics["learn/grad_norm"] > 0
    assert learner.logprobs(batch) == before
    learner.save(str(tmp_path))
    saved = weights_of(tmp_path / "huggingface")
    for name, tensor in weights_of(tiny_model).items():
        assert torch.equal(saved[name], tensor), name


def test_a_learning_rate_above_zero_moves_both(make_learner: MakeLearner) -> None:
    """The counterpart of the test before: its assertions do fail once something is learned."""
    learner = make_learner()
    learner.begin_phase(OptimizerConfig(lr=1e-3), 100)
    batch = batch_with_padding(0)
    before = learner.logprobs(batch)
    assert abs(learner.update([batch, batch]).metrics["learn/kl"]) > 1e-4
    assert learner.logprobs(batch) != before


def test_logprobs_come_back_in_order_without_padding_from_two_ranks(
    make_learner: MakeLearner, tiny_model: Path
) -> None:
    samples = ragged_samples()
    rows = make_learner(TWO_RANKS).logprobs(TrainBatch(samples=samples))
    model = load(tiny_model)
    assert len(rows) == len(samples) == 7
    for row, sample in zip(rows, samples, strict=True):
        with torch.no_grad():
            expected = token_logprobs(model, sample.prompt_ids, sample.response_ids, 1.0)
        torch.testing.assert_close(torch.tensor(row), expected, rtol=0, atol=1e-4)
