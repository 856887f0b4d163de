from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from environments.errors import LearnerError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from policies.learning.algorithms import resolve
from policies.learning.samples import has_signal, returns_to_go, training_samples, turn_rewards
from policies.learning.settings import AlgorithmConfig

BROADCAST = resolve(AlgorithmConfig(), 64)
PER_STEP = resolve(AlgorithmConfig(credit="per_step", gamma=0.5), 64)


def completion(**fields: Any) -> Completion:
    tokens = {"prompt_ids": (1, 2), "completion_ids": (3, 4), "logprobs": (-0.5, -0.25)}
    return Completion(**{**tokens, "text": "x", "finish_reason": "stop", **fields})


def trajectory(*completions: Completion | None) -> Trajectory:
    steps = [Step(completion=completion) for completion in completions]
    return Trajectory(steps=steps, rollout_id="000007/0001")


def test_extended_turns_are_one_masked_sample() -> None:
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
def test_tokens_that_are_not_engines_are_refused_with_remedy(untrusted: Completion) -> None:
    with pytest.raises(LearnerError, match=r"000007/0001.*by its handle.*return_token_ids"):
        training_samples(trajectory(completion(), untrusted))


def test_failed_rollout_and_empty_completion_have_no_samples() -> None:
    failed = Trajectory(termination_reason=TerminationReason.ENV_ERROR, error="The world broke.")
    assert training_samples(failed) == []
    assert training_samples(trajectory(None, completion(completion_ids=(), logprobs=()))) == []


@pytest.mark.parametrize("reason", list(TerminationReason))
def test_only_trajectories_that_were_judged_are_learnt_from(reason: TerminationReason) -> None:
    played = trajectory(completion())
    played.termination_reason = reason
    judged = not reason.is_failure and reason not in (
        TerminationReason.TIMEOUT,
        TerminationReason.JUDGED_LATER,
    )
    assert len(training_samples(played)) == int(judged)
    played.masked = True
    assert training_samples(played) == []


def rewarded(*steps: tuple[Completion | None, float]) -> Trajectory:
    played = [Step(completion=completion, reward=reward) for completion, reward in steps]
    total = sum(reward for _, reward in steps)
    return Trajectory(steps=played, rollout_id="000007/0001", reward=total)


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="000007", task={}, trajectories=trajectories)


def test_token_knows_its_turn_and_the_last_one_its_reward() -> None:
    later = completion(prompt_ids=(1, 2, 3, 4, 5), completion_ids=(6,), logprobs=(-1.0,))
    rewritten = completion(prompt_ids=(1, 9), completion_ids=(7, 8), logprobs=(-1.0, -1.0))
    first, second = training_samples(rewarded((completion(), 0.5), (later, -1.0), (rewritten, 2.0)))
    assert (first.turns, first.rewards) == ((0, 0, -1, 1), (0.0, 0.5, 0.0, -1.0))
    assert (second.turns, second.rewards) == ((2, 2), (0.0, 2.0))
    assert {first.rollout_id, second.rollout_id} == {"000007/0001"}


def test_reward_of_an_unsampled_step_goes_to_one_before_or_first() -> None:
    silent = completion(completion_ids=(), logprobs=())
    again = completion(prompt_ids=(1, 2, 3, 4, 5))
    played = rewarded(
        (None, 0.25), (silent, 0.5), (completion(), 1.0), (None, 2.0), (again, 4.0), (silent, 8.0)
    )
    assert turn_rewards(played) == {2: 3.75, 4: 12.0}
    (sample,) = training_samples(played)
    assert sum(sample.rewards) == played.reward
    assert turn_rewards(rewarded((None, 1.0))) == {}


def test_unseen_answer_is_not_trained_and_its_reward_stays() -> None:
    again = completion(prompt_ids=(1, 2, 3, 4, 5))
    played = rewarded((completion(), 1.0), (again, 2.0))
    played.steps[1].info["unseen"] = True
    (sample,) = training_samples(played)
    assert set(sample.turns) == {0}
    assert sum(sample.rewards) == played.reward


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e16])
def test_rewards_that_are_not_finite_are_refused(reward: float) -> None:
    played = rewarded((completion(), 0.0), (None, reward))
    with pytest.raises(
        LearnerError, match=rf"'000007/0001' has the reward {re.escape(str(reward))} at step 1"
    ):
        training_samples(played)
    with pytest.raises(LearnerError, match="has to return a finite number"):
        has_signal(group(played, played), BROADCAST)


def test_tokens_left_out_are_in_no_column_any_more() -> None:
    (sample,) = training_samples(rewarded((completion(), 1.0)))
    sample = replace(sample, advantages=(2.0, 3.0))
    thinned = sample.without_tokens([False, True])
    assert (thinned.loss_mask, thinned.turns) == ((1, 0), (0, -1))
    assert (thinned.rollout_logprobs, thinned.advantages) == ((-0.5, 0.0), (2.0, 0.0))
    assert (thinned.rewards, thinned.old_logprobs) == ((0.0, 0.0), ())
    assert sample.without_tokens([False, False]) == sample


def test_returns_are_discounted_by_the_turn() -> None:
    assert returns_to_go([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert returns_to_go([], 0.5) == []


def test_group_has_a_signal_if_rewards_differ() -> None:
    good, bad = rewarded((completion(), 1.0)), rewarded((completion(), 0.0))
    assert has_signal(group(good, bad), BROADCAST)
    assert not has_signal(group(good, good), BROADCAST)
    assert not has_signal(group(good), BROADCAST)
    assert not has_signal(group(), BROADCAST)
    almost = rewarded((completion(), 0.1 + 0.2), (completion(), 0.7))
    exact = rewarded((completion(), 0.3), (completion(), 0.7 - 1e-12))
    assert not has_signal(group(almost, exact), BROADCAST), "rounding is no signal"


def test_member_spoilt_by_infrastructure_is_no_signal() -> None:
    good, other = rewarded((completion(), 1.0)), rewarded((completion(), 0.0))
    other.termination_reason = TerminationReason.CRASHED
    assert not has_signal(group(good, other), BROADCAST)
    other.termination_reason = TerminationReason.TIMEOUT
    assert has_signal(group(good, other), BROADCAST)
    other.steps = []
    assert not has_signal(group(good, other), BROADCAST), "the world hung before the policy had its turn"


def test_with_credit_by_turn_returns_of_turn_are_signal() -> None:
    early = rewarded((completion(), 1.0), (completion(), 0.0))
    late = rewarded((completion(), 0.0), (completion(), 1.0))
    assert not has_signal(group(early, late), BROADCAST)
    assert has_signal(group(early, late), PER_STEP)
    assert not has_signal(group(early, early), PER_STEP)
    further = rewarded((completion(), 1.0), (completion(), 0.0), (completion(), 0.0))
    assert not has_signal(group(early, further), PER_STEP), "nobody else reached its last turn"
