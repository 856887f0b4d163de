"""After a publish the engine speaks with the published weights: all of them, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from transformers_reference import greedy, load, perturbed, weights_of

from environments.types import Completion
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import LearnerConfig, OptimizerConfig
from policies.sampler import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import MakeLearner, ServedPolicy

pytestmark = pytest.mark.engine

MAX_TOKENS = 12
PROMPTS = ["What is 12+34?", "What is 56*78? Count to a hundred first. " * 10]


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


def assert_five_publishes_are_spoken(policy: ServedPolicy) -> None:
    sampler, original = policy.sampler(), weights_of(policy.model_path)
    spoken = set()
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


def test_each_of_five_publishes_is_spoken_with_a_tied_output_layer(policy_app: ServedPolicy) -> None:
    assert_five_publishes_are_spoken(policy_app)


def test_a_policy_server_that_starts_late_speaks_with_the_newest_weights_at_once(
    late_policy: ServedPolicy,
) -> None:
    """Its output layer is not tied. Nothing waits for a version here: it has to be the first answer's."""
    newest = ray.get(late_policy.store.newest.remote())
    answers = speak(late_policy.sampler())
    assert {answer.policy_version for answer in answers} == {newest.version} == {2}
    assert_spoken_by(
        load(late_policy.model_path, perturbed(weights_of(late_policy.model_path), seed=99)), answers
    )


def test_each_of_five_publishes_is_spoken_with_an_output_layer_of_its_own(late_policy: ServedPolicy) -> None:
    assert_five_publishes_are_spoken(late_policy)


def test_what_the_learner_publishes_is_what_the_engine_speaks(
    policy_app: ServedPolicy, sampler: Any, make_learner: MakeLearner, tmp_path: Path
) -> None:
    learner = make_learner(LearnerConfig(num_workers=2, micro_batch_tokens=512))
    learner.begin_phase(OptimizerConfig(lr=1e-2), 10)
    answers = speak(sampler)
    learner.fit([TrainBatch(samples=tuple(_sample(answer) for answer in answers))] * 2)
    version = ray.get(policy_app.store.newest.remote()).version + 1
    learner.publish(version)
    learner.save(str(tmp_path))
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
