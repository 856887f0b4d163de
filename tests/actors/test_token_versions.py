"""Generations outlive a publish, and each token says which weights have sampled it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
from conftest import wait_until
from transformers_reference import load, perturbed, token_logprobs, weights_of

from environments.types import Completion
from policies.sampler import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import ServedPolicy

pytestmark = pytest.mark.engine

NUM_REQUESTS = 4
MESSAGES = [{"role": "user", "content": "What is 12+34? " * 20}]
PARAMS = SamplingParams(temperature=2, max_tokens=400)
TOLERANCE = 1e-4


def generate_through_three_publishes(policy: ServedPolicy) -> tuple[dict[int, Any], list[Completion]]:
    """The models by version, and completions during which all of them were published, one by one."""
    original = weights_of(policy.model_path)
    weights = {policy.publish(original): original}
    sampler = policy.sampler()
    calls = [
        sampler.sample.remote(SampleRequest(messages=MESSAGES, params=PARAMS)) for _ in range(NUM_REQUESTS)
    ]
    wait_until(lambda: num_running(sampler) == NUM_REQUESTS)
    for seed in range(3):
        different = perturbed(original, seed)
        weights[policy.publish(different)] = different
    completions = ray.get(calls)
    policy.publish(original)
    models = {version: load(policy.model_path, tensors) for version, tensors in weights.items()}
    return models, completions


def assert_versions_are_right(
    models: dict[int, Any],
    completions: list[Completion],
    logprobs_of: Callable[[dict[int, Any], Completion, tuple[int, ...]], torch.Tensor],
) -> None:
    """The log-probabilities say so, and would deny versions that change a token too early or too late."""
    assert max(len(set(each.token_versions)) for each in completions) == len(models) == 4
    denied = []
    for completion in completions:
        versions, found = completion.token_versions, torch.tensor(completion.logprobs)
        assert len(versions) == len(completion.completion_ids)
        assert list(versions) == sorted(versions)
        assert completion.policy_version == versions[0]
        expected = logprobs_of(models, completion, versions)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        for wrong in (versions[:1] + versions[:-1], versions[1:] + versions[-1:]):
            if wrong != versions:
                off = (found - logprobs_of(models, completion, wrong)).abs()
                denied.append(off.max() > 10 * TOLERANCE)
    assert len(denied) >= NUM_REQUESTS
    assert all(denied)


def recomputed(models: dict[int, Any], completion: Completion, versions: tuple[int, ...]) -> torch.Tensor:
    """Every token as its version sees the whole sequence before it."""
    by_version = {
        version: token_logprobs(
            models[version], completion.prompt_ids, completion.completion_ids, PARAMS.temperature
        )
        for version in set(versions)
    }
    return torch.stack([by_version[version][index] for index, version in enumerate(versions)])


def kept(models: dict[int, Any], completion: Completion, versions: tuple[int, ...]) -> torch.Tensor:
    """Every token as its version sees it with the keys and values that older versions have left behind."""
    from transformers import DynamicCache

    ids = torch.tensor([completion.prompt_ids + completion.completion_ids])
    num_prompt = len(completion.prompt_ids)
    changes = [0] + [index for index, (old, new) in enumerate(pairwise(versions), 1) if old != new]
    cache, logits = DynamicCache(), []
    for first, end in pairwise([*changes, len(versions)]):
        start = num_prompt + first - 1 if first else 0  # a token is computed from the one before it
        model = models[versions[first]]
        output = model(ids[:, start : num_prompt + end - 1], past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, -(end - first) :])
    logprobs = (torch.cat(logits) / PARAMS.temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, num_prompt:].unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def test_three_publishes_in_a_generation_whose_cache_is_recomputed(policy_app: ServedPolicy) -> None:
    models, completions = generate_through_three_publishes(policy_app)
    assert_versions_are_right(models, completions, recomputed)


@torch.no_grad()
def test_three_publishes_in_a_generation_that_keeps_its_cache(late_policy: ServedPolicy) -> None:
    models, completions = generate_through_three_publishes(late_policy)
    assert_versions_are_right(models, completions, kept)
    with pytest.raises(AssertionError):  # the other choice is another computation
        assert_versions_are_right(models, completions, recomputed)


def num_running(sampler: Any) -> int:
    return sum(each.num_running for each in ray.get(sampler.status.remote()).replicas.values())
