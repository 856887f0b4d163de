"""Engine, learner and plain transformers give the same log-probabilities: nothing needs correction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
from transformers_reference import load, token_logprobs

from environments.types import Completion, Step, Trajectory
from policies.learning.samples import TrainBatch, training_samples
from policies.sampler import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import MakeLearner, ServedPolicy

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
PROMPTS = ["What is 12+34?", "Hi", "What is 56*78? Count to a hundred first. " * 10]


@pytest.fixture(scope="module", params=[1.0, 0.7], ids=lambda temperature: f"temperature {temperature}")
def sampled(request: pytest.FixtureRequest, sampler: Any) -> tuple[float, list[Completion]]:
    """A temperature, and what the engine sampled with it."""
    calls = [
        sampler.sample.remote(
            SampleRequest(
                messages=[{"role": "user", "content": prompt}],
                params=SamplingParams(temperature=request.param, max_tokens=24, seed=seed),
            )
        )
        for prompt in PROMPTS
        for seed in range(3)
    ]
    completions = ray.get(calls)
    assert max(len(each.prompt_ids) for each in completions) > 128  # more than one block of the cache
    return request.param, completions


@pytest.fixture(scope="module")
def reference(
    sampled: tuple[float, list[Completion]], policy_app: ServedPolicy
) -> list[tuple[Completion, torch.Tensor]]:
    temperature, completions = sampled
    model = load(policy_app.model_path)
    with torch.no_grad():
        return [
            (each, token_logprobs(model, each.prompt_ids, each.completion_ids, temperature))
            for each in completions
        ]


def test_the_engine_agrees_with_transformers(reference: list[tuple[Completion, torch.Tensor]]) -> None:
    for completion, expected in reference:
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=TOLERANCE)


def test_the_learner_agrees_with_transformers(
    sampled: tuple[float, list[Completion]],
    reference: list[tuple[Completion, torch.Tensor]],
    make_learner: MakeLearner,
) -> None:
    temperature, completions = sampled
    samples = [training_samples(Trajectory(steps=[Step(completion=each)]))[0] for each in completions]
    rows = make_learner().logprobs(TrainBatch(samples=tuple(samples), temperature=temperature))
    for row, (_, expected) in zip(rows, reference, strict=True):
        torch.testing.assert_close(torch.tensor(row), expected, rtol=0, atol=TOLERANCE)
