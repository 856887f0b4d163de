"""After a publish the engine speaks with the published weights: all of them, and no others.

Generations outlive a publish, and each of their tokens says which weights have sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
from machine import wait_until
from served_policy import publish, serve_policy
from transformers_reference import greedy, load, perturbed, token_logprobs, weights_of

from actors.settings import ServerConfig
from actors.weights.store import WeightStore
from environments.errors import TroupeError
from environments.types import Completion
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import LearnerConfig, OptimizerConfig
from policies.sampler import EngineOptions, SampleRequest, SamplingParams
from policies.settings import EngineConfig

if TYPE_CHECKING:
    from learner_samples import MakeLearner
    from served_policy import ServedPolicy

MAX_TOKENS = 12
PROMPTS = ["What is 12+34?", "What is 56*78? Count to a hundred first. " * 10]


@pytest.fixture(scope="module")
def late_policy(serve_port: int, untied_model: Path) -> Iterator[ServedPolicy]:
    """``untied_model`` on two replicas that keep their cache, started when version 2 is there (seed 99).

    The weights stay changed.
    """
    store, weights = WeightStore.remote(), weights_of(untied_model)
    for seed in (98, 99):
        publish(store, perturbed(weights, seed))
    config = ServerConfig(num_replicas=2, engine=EngineConfig(options={"cache_after_publish": "keep"}))
    with serve_policy("late", untied_model, store, config) as policy:
        yield policy


@pytest.fixture(scope="module")
def late_sampler(late_policy: ServedPolicy) -> Any:
    return late_policy.sampler()


def speak(sampler: Any, version: int = 0) -> list[Completion]:
    """The greedy answers to the same prompts each time, so that a stale prefix cache would show."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    calls = [
        sampler.sample.remote(
            SampleRequest(messages=[{"role": "user", "content": prompt}], params=params, min_version=version)
        )
        for prompt in PROMPTS
    ]
    return ray.get(calls)


def assert_spoken_by(model: Any, answers: list[Completion]) -> None:
    assert max(len(answer.prompt_ids) for answer in answers) > 128
    for answer in answers:
        assert answer.completion_ids == greedy(model, answer.prompt_ids, MAX_TOKENS)


def assert_five_publishes_are_spoken(policy: ServedPolicy, sampler: Any) -> None:
    original, spoken = weights_of(policy.model_path), set()
    for seed in range(5):
        weights = perturbed(original, seed)
        version = policy.publish(weights)
        answers = speak(sampler)
        assert {answer.policy_version for answer in answers} == {version}
        assert_spoken_by(load(policy.model_path, weights), answers)
        spoken.add(tuple(answer.completion_ids for answer in answers))
    assert len(spoken) == 5  # else stale weights would not have been noticed
    policy.publish(original)
    assert_spoken_by(load(policy.model_path), speak(sampler))


def test_each_of_five_publishes_is_spoken_with_tied_output_layer(
    policy_app: ServedPolicy, sampler: Any
) -> None:
    assert_five_publishes_are_spoken(policy_app, sampler)


def test_policy_server_started_late_has_the_newest_weights(
    late_policy: ServedPolicy, late_sampler: Any
) -> None:
    """Its output layer is not tied. Nothing waits for a version here: it has to be the first answer's."""
    newest = ray.get(late_policy.store.newest.remote())
    answers = speak(late_sampler)
    assert {answer.policy_version for answer in answers} == {newest.version} == {2}
    assert_spoken_by(
        load(late_policy.model_path, perturbed(weights_of(late_policy.model_path), seed=99)), answers
    )


def test_publishes_of_five_versions_each_speak_with_their_layer(
    late_policy: ServedPolicy, late_sampler: Any
) -> None:
    assert_five_publishes_are_spoken(late_policy, late_sampler)


@pytest.mark.parametrize(("num_turns", "version_lag"), [(1, 0), (4, 1)], ids=["turns", "conversations"])
def test_two_engines_share_what_is_sent_after_publishes(
    late_policy: ServedPolicy, late_sampler: Any, num_turns: int, version_lag: int
) -> None:
    """After three publishes, which they may still be loading, each answers half within a tenth: of the single
    turns of a synchronous run, and of the conversations of an asynchronous one.

    On a busy machine an engine may be silent for a second or load for a lease, and the other one has its part
    then: so these are three of at most eight.
    """
    weights, answered = weights_of(late_policy.model_path), num_answered(late_sampler)
    found: list[list[int]] = []
    while sum(max(each) <= 22 * num_turns for each in found) < 3:
        assert len(found) < 8, found
        version = publish(late_policy.store, weights) - version_lag
        for _ in range(num_turns):
            ray.get([late_sampler.sample.remote(request_of(each, version)) for each in range(40)])
        before, answered = answered, num_answered(late_sampler)
        shares = [number - before.get(name, 0) for name, number in answered.items()]
        assert sum(shares) == 40 * num_turns, shares
        found.append(shares)


def request_of(conversation: int, min_version: int) -> SampleRequest:
    """The next request of a conversation, whatever it was about before."""
    question = {"role": "user", "content": f"What is {conversation}+34?"}
    params = SamplingParams(max_tokens=40, options=EngineOptions(ignore_eos=True))
    name = f"{conversation} since {min_version}"
    return SampleRequest(messages=[question], params=params, session_id=name, min_version=min_version)


def test_what_the_learner_publishes_is_what_the_engine_speaks(
    policy_app: ServedPolicy, sampler: Any, make_learner: MakeLearner, tmp_path: Path
) -> None:
    learner = make_learner(LearnerConfig(num_workers=2, micro_batch_tokens=512))
    learner.begin_phase(OptimizerConfig(lr=1e-2), 10)
    answers = speak(sampler)
    learner.fit([TrainBatch(samples=tuple(_sample(answer) for answer in answers))] * 2)
    version = policy_app.publish(weights_of(policy_app.model_path)) + 1
    learner.publish(version)
    learner.begin_save(str(tmp_path))()
    learned = speak(sampler, version)
    assert_spoken_by(load(tmp_path / "huggingface"), learned)
    assert [each.completion_ids for each in learned] != [each.completion_ids for each in answers]
    policy_app.publish(weights_of(policy_app.model_path))


def _sample(completion: Completion) -> TrainingSample:
    """Teach the model to say something else."""
    ids = completion.completion_ids[::-1] + completion.prompt_ids[:5]
    return TrainingSample(
        sample_id="",
        prompt_ids=completion.prompt_ids,
        response_ids=ids,
        loss_mask=(1,) * len(ids),
        rollout_logprobs=(0.0,) * len(ids),
    )


# -- generations that go on through a publish -----------------------------------------------------------

NUM_REQUESTS = 16
"""A token in 300 ends an answer: of so many, some go on through three publishes."""
PARAMS = SamplingParams(temperature=2, max_tokens=400)
TOLERANCE = 1e-4


def generate_through_three_publishes(
    policy: ServedPolicy, sampler: Any
) -> tuple[dict[int, Any], list[Completion]]:
    """The models by version, and completions during which all of them were published, one by one."""
    for attempt in range(5):  # on a busy machine all answers may end before the third publish
        weights, completions = publish_while_generating(policy, sampler, "What is 12+34? " * (20 + attempt))
        if max(len(set(each.token_versions)) for each in completions) == len(weights):
            break
    models = {version: load(policy.model_path, tensors) for version, tensors in weights.items()}
    return models, completions


def publish_while_generating(
    policy: ServedPolicy, sampler: Any, question: str
) -> tuple[dict[int, dict[str, torch.Tensor]], list[Completion]]:
    """The weights by version, and completions that had begun when the last three were published."""
    original = weights_of(policy.model_path)
    weights = {policy.publish(original): original}
    request = SampleRequest(messages=[{"role": "user", "content": question}], params=PARAMS)
    calls = [sampler.sample.remote(request) for _ in range(NUM_REQUESTS)]
    wait_until(lambda: num_running(sampler) > NUM_REQUESTS // 2)
    for seed in range(3):
        different = perturbed(original, seed)
        weights[policy.publish(different)] = different
    completions = ray.get(calls)
    policy.publish(original)
    return weights, completions


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
def test_three_publishes_in_generation_whose_cache_is_recomputed(
    policy_app: ServedPolicy, sampler: Any
) -> None:
    models, completions = generate_through_three_publishes(policy_app, sampler)
    assert_versions_are_right(models, completions, recomputed)


@torch.no_grad()
def test_three_publishes_in_a_generation_that_keeps_its_cache(
    late_policy: ServedPolicy, late_sampler: Any
) -> None:
    models, completions = generate_through_three_publishes(late_policy, late_sampler)
    assert_versions_are_right(models, completions, kept)
    with pytest.raises(AssertionError):  # the other choice is another computation
        assert_versions_are_right(models, completions, recomputed)


def test_publish_that_lacks_a_weight_is_an_error_that_names_it(late_policy: ServedPolicy) -> None:
    """The last one of its engines, which it ends."""
    weights = weights_of(late_policy.model_path)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    publish(late_policy.store, weights)
    with pytest.raises(TroupeError, match=r"published weights lack model\.layers\.0\.self_attn\.qkv_proj"):
        wait_until(lambda: late_policy.app.check_replicas() is not None)


def num_running(sampler: Any) -> int:
    return sum(each.num_running for each in ray.get(sampler.status.remote()).replicas.values())


def num_answered(sampler: Any) -> dict[str, int]:
    """By replica."""
    return {name: each.num_answered for name, each in ray.get(sampler.status.remote()).replicas.items()}
