from __future__ import annotations

from typing import Any

import pytest

from environments.errors import LearnerError
from environments.types import Completion, Step, TerminationReason, Trajectory
from policies.learning.samples import training_samples


def completion(**fields: Any) -> Completion:
    tokens = {"prompt_ids": (1, 2), "completion_ids": (3, 4), "logprobs": (-0.5, -0.25)}
    return Completion(**{**tokens, "text": "x", "finish_reason": "stop", **fields})


def trajectory(*completions: Completion | None) -> Trajectory:
    steps = [Step(completion=completion) for completion in completions]
    return Trajectory(steps=steps, rollout_id="000007/0001")


def test_extended_turns_are_one_sample_and_the_mask_leaves_out_what_came_between() -> None:
    later = completion(prompt_ids=(1, 2, 3, 4, 5), completion_ids=(6,), logprobs=(-1.0,), policy_version=2)
    (sample,) = training_samples(trajectory(completion(policy_version=3), later))
    assert sample.prompt_ids == (1, 2)
    assert sample.response_ids == (3, 4, 5, 6)
    assert sample.loss_mask == (1, 1, 0, 1)
    assert sample.rollout_logprobs == (-0.5, -0.25, 0.0, -1.0)
    assert (sample.sample_id, sample.policy_version) == ("000007/0001#0", 2)


def test_rewritten_history_starts_a_new_sample() -> None:
    samples = training_samples(trajectory(completion(), completion(prompt_ids=(1, 2, 3, 9))))
    assert [sample.prompt_ids for sample in samples] == [(1, 2), (1, 2, 3, 9)]
    assert [sample.loss_mask for sample in samples] == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    "untrusted",
    [
        completion(retokenized=True, logprobs=()),
        completion(retokenized=True, prompt_ids=(), completion_ids=(), logprobs=(), usage=(3, 2)),
        completion(prompt_ids=(), completion_ids=(), logprobs=()),
    ],
    ids=["retokenized", "counted only", "nothing known"],
)
def test_tokens_that_are_not_the_engines_are_refused_with_the_remedy(untrusted: Completion) -> None:
    with pytest.raises(LearnerError, match=r"000007/0001.*by its handle.*return_token_ids"):
        training_samples(trajectory(completion(), untrusted))


def test_trajectory_says_whether_its_tokens_are_the_engines() -> None:
    assert not trajectory(completion(), None).retokenized
    assert trajectory(completion(), completion(retokenized=True)).retokenized


def test_failed_rollout_and_empty_completion_have_no_samples() -> None:
    failed = Trajectory(termination_reason=TerminationReason.ENV_ERROR, error="The world broke.")
    assert training_samples(failed) == []
    assert training_samples(trajectory(None, completion(completion_ids=(), logprobs=()))) == []


@pytest.mark.parametrize("reason", list(TerminationReason))
def test_only_trajectories_that_were_judged_are_learnt_from(reason: TerminationReason) -> None:
    played = trajectory(completion())
    played.termination_reason = reason
    judged = not reason.is_failure and reason is not TerminationReason.TIMEOUT
    assert len(training_samples(played)) == int(judged)
    played.masked = True
    assert training_samples(played) == []
