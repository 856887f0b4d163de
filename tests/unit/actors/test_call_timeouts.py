"""The time limit of a learner's call: from earlier calls of its kind, and from the tokens of this one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from learner_samples import batches

from actors.learning.call_timeouts import SLOWDOWN_FACTOR, CallTimeouts, num_scored_tokens, num_trained_tokens
from actors.timing import MIN_TIMEOUT_SECONDS
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, padding_sample
from policies.learning.settings import AlgorithmConfig, CorrectionConfig, KLConfig


def test_first_call_gets_whole_limit_later_ones_follow_longest() -> None:
    patience = CallTimeouts(1800)
    assert patience.limit("save").seconds == 1800
    for seconds in (30.0, 50.0, 10.0):
        patience.record("save", seconds)
    assert patience.limit("save").seconds == SLOWDOWN_FACTOR * 50
    assert patience.limit("load").seconds == 1800


def test_a_limit_is_never_below_the_floor_nor_above_the_setting() -> None:
    patience = CallTimeouts(1800)
    patience.record("publish_weights", 0.1)
    assert patience.limit("publish_weights").seconds == MIN_TIMEOUT_SECONDS
    patience.record("save", 1000)
    assert patience.limit("save").seconds == 1800
    short = CallTimeouts(5)
    short.record("save", 0.1)
    assert short.limit("save").seconds == 5


def test_a_limit_grows_with_the_tokens_of_the_call() -> None:
    """A warm start fits a few demonstrations in 4 s, expert iteration then a hundred times as many."""
    patience = CallTimeouts(7200)
    patience.record("fit", 4.0, num_tokens=1000)
    assert patience.limit("fit", num_tokens=1000).seconds == MIN_TIMEOUT_SECONDS
    assert patience.limit("fit", num_tokens=100_000).seconds == SLOWDOWN_FACTOR * 400
    assert patience.limit("fit", num_tokens=1_000_000).seconds == 7200


def test_a_limit_does_not_shrink_with_the_tokens() -> None:
    """Part of a call's time is the same for any number of them."""
    patience = CallTimeouts(7200)
    patience.record("update", 300.0, num_tokens=100_000)
    assert patience.limit("update", num_tokens=10).seconds == SLOWDOWN_FACTOR * 300


def test_call_that_scored_nothing_sets_no_limit_for_others() -> None:
    patience = CallTimeouts(1800)
    patience.record("score", 0.1)
    assert patience.limit("score").seconds == MIN_TIMEOUT_SECONDS
    assert patience.limit("score", num_tokens=100_000).seconds == 1800


def test_the_error_names_the_limit_that_was_exceeded() -> None:
    patience = CallTimeouts(1800)
    assert "did not answer for 1800 s (learner.max_call_seconds" in patience.limit("fit", 10).exceeded
    patience.record("fit", 30.0, num_tokens=10)
    exceeded = patience.limit("fit", 20).exceeded
    assert "for 600 s (10 times the 60 s that `fit` took before for as much," in exceeded
    assert "max_call_seconds" not in exceeded


ONE, TWO = batches(1), batches(2)


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        (AlgorithmConfig(), [TWO[1:]]),
        (AlgorithmConfig(correction=CorrectionConfig(mode="bypass")), []),
        (AlgorithmConfig(correction=CorrectionConfig(level="token", mask_above=2.0)), [TWO]),
        (AlgorithmConfig(kl=KLConfig(place="loss")), [TWO[1:], TWO]),
        (AlgorithmConfig(kl=KLConfig(place="reward")), [TWO, TWO]),
    ],
)
def test_scored_tokens_are_those_of_policy_and_reference(
    algorithm: AlgorithmConfig, parts: list[list[TrainBatch]]
) -> None:
    assert num_scored_tokens(TWO, resolve(algorithm, 64)) == sum(map(num_trained_tokens, parts))


def test_a_batch_that_takes_no_step_has_no_trained_tokens() -> None:
    masked = replace(ONE[0], samples=(padding_sample(1),))
    assert num_trained_tokens([*ONE, masked]) == sum(map(len, ONE[0].samples)) > 0
