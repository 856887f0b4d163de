"""Engine, learner and plain transformers give the same log-probabilities: nothing needs correction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
from learner_samples import num_rows
from transformers_reference import load, token_logprobs, weights_of

from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from launch.reporting.metrics import FRESH_MISMATCH, mismatch_alarm, mismatch_metrics
from launch.training.engine_comparison import LogprobProbe
from policies.learning.samples import TrainBatch, training_samples
from policies.learning.settings import LearnerConfig
from policies.sampler import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from learner_samples import MakeRank
    from served_policy import ServedPolicy

TOLERANCE = 1e-4
PROMPTS = ["What is 12+34?", "Hi", "What is 56*78? Count to a hundred first. " * 10]


def sample(sampler: Any, temperature: float, min_version: int = 0) -> list[Completion]:
    calls = [
        sampler.sample.remote(
            SampleRequest(
                messages=[{"role": "user", "content": prompt}],
                params=SamplingParams(temperature=temperature, max_tokens=24, seed=seed),
                min_version=min_version,
            )
        )
        for prompt in PROMPTS
        for seed in range(3)
    ]
    return ray.get(calls)


def batch_of(completions: list[Completion], temperature: float) -> TrainBatch:
    samples = [training_samples(Trajectory(steps=[Step(completion=each)]))[0] for each in completions]
    return TrainBatch(samples=tuple(samples), temperature=temperature)


@pytest.fixture(scope="module", params=[1.0, 0.7], ids=lambda temperature: f"temperature {temperature}")
def sampled(request: pytest.FixtureRequest, sampler: Any) -> tuple[float, list[Completion]]:
    """A temperature, and what the engine sampled with it."""
    completions = sample(sampler, request.param)
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


def test_engine_agrees_with_transformers(reference: list[tuple[Completion, torch.Tensor]]) -> None:
    for completion, expected in reference:
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=TOLERANCE)


def test_learner_agrees_with_transformers(
    sampled: tuple[float, list[Completion]],
    reference: list[tuple[Completion, torch.Tensor]],
    make_rank: MakeRank,
) -> None:
    temperature, completions = sampled
    batch = batch_of(completions, temperature)
    assert num_rows(batch.samples) <= len(PROMPTS) < len(batch.samples), "it computes trees"
    rows = make_rank().logprobs(batch)
    for row, (_, expected) in zip(rows, reference, strict=True):
        torch.testing.assert_close(torch.tensor(row), expected, rtol=0, atol=TOLERANCE)


def test_one_wrong_weight_in_the_engine_raises_the_alarm(
    policy_app: ServedPolicy, sampler: Any, make_rank: MakeRank
) -> None:
    learner, right = make_rank(), weights_of(policy_app.model_path)
    name = "model.layers.0.mlp.down_proj.weight"
    for weights, is_alarmed in ((right, False), (right | {name: right[name] * 2}, True), (right, False)):
        version = policy_app.publish(weights)
        batch = batch_of(sample(sampler, 1.0, version), 1.0)
        rows = zip(batch.samples, learner.logprobs(batch), strict=True)
        scored = [replace(taken, old_logprobs=tuple(row)) for taken, row in rows]
        numbers = mismatch_metrics(scored, version)
        assert (numbers[FRESH_MISMATCH] >= 1e-3) == is_alarmed
        assert (mismatch_alarm(numbers, LearnerConfig().mismatch_alarm) is not None) == is_alarmed


def test_probe_raises_the_alarm_where_nothing_else_is_fresh(
    policy_app: ServedPolicy, sampler: Any, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.training.engine_comparison.MAX_MISSED", 0)  # wait for each answer
    learner, right = make_rank(), weights_of(policy_app.model_path)
    probe = LogprobProbe(sampler.sample_tokens.remote, temperature=0.7)
    rollout = Trajectory(steps=[Step(completion=sample(sampler, 0.7)[0])])
    group = TrajectoryGroup(group_id="0", task={}, trajectories=(rollout,))
    name = "model.layers.1.self_attn.o_proj.weight"
    for weights, is_alarmed in ((right, False), (right | {name: right[name] * 2}, True), (right, False)):
        version = policy_app.publish(weights)
        probe.begin([group], version)
        (taken,) = probe.take(version)
        (row,) = learner.logprobs(TrainBatch(samples=(taken,), temperature=0.7))
        numbers = mismatch_metrics([replace(taken, old_logprobs=tuple(row))], version)
        assert (mismatch_alarm(numbers, LearnerConfig().mismatch_alarm) is not None) == is_alarmed
