"""Importance weights, and the tokens that are left out for theirs, against the formulas."""

from __future__ import annotations

import math

import pytest

from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.correction import importance_weights, without_far_tokens
from policies.learning.samples import TrainingSample
from policies.learning.settings import AlgorithmConfig, CorrectionConfig

RATIOS = {"g/0#0": [0.25, 1.0, 3.0], "g/0#1": [1.1], "g/1#0": [0.8, 0.5, 0.9, 6.0, 1.0]}
"""Learner's over engine's probability of each sampled token."""


def algorithm(**correction: object) -> Algorithm:
    return resolve(AlgorithmConfig(correction=CorrectionConfig(**correction)), 64)


def sample(sample_id: str, ratios: list[float]) -> TrainingSample:
    """Two sampled tokens, one of the environment, and then the rest."""
    mask = (1,) * len(ratios) if len(ratios) < 3 else (1, 1, 0, *(1 for _ in ratios[2:]))
    empty = TrainingSample(
        sample_id=sample_id,
        prompt_ids=(1,),
        response_ids=(2,) * len(mask),
        loss_mask=mask,
        rollout_logprobs=(-1.0,) * len(mask),
        turns=tuple(bit - 1 for bit in mask),
        rewards=(0.0,) * len(mask),
    )
    return TrainingSample(
        sample_id=sample_id,
        prompt_ids=(1,),
        response_ids=empty.response_ids,
        loss_mask=mask,
        rollout_logprobs=empty.on_sampled_tokens([-1.0] * len(ratios)),
        turns=empty.turns,
        rewards=empty.rewards,
        old_logprobs=empty.on_sampled_tokens([math.log(ratio) - 1.0 for ratio in ratios]),
        advantages=empty.on_sampled_tokens([2.0] * len(ratios)),
    )


SAMPLES = [sample(sample_id, ratios) for sample_id, ratios in RATIOS.items()]


def test_weight_is_ratio_of_token_or_product_over_sample() -> None:
    import torch

    ratios = torch.tensor([[0.25, 1.0, 3.0], [1.1, 0.5, 7.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    weights = importance_weights(ratios.log(), mask, "token")
    torch.testing.assert_close(weights, torch.tensor([[0.25, 1.0, 3.0], [1.1, 0.5, 0.0]]))
    weights = importance_weights(ratios.log(), mask, "sequence")
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.75, 0.75], [0.55, 0.55, 0.0]]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_those_of_verl_and_stay_finite(level: str) -> None:
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    gap = torch.tensor([[-60.0, 0.5, 0.0], [60.0, -1.0, 0.0], [0.1, 0.2, 0.3], [0.0, -500.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    theirs, _ = compute_rollout_correction_weights(gap, mask, level, rollout_is_threshold=math.inf)
    ours = importance_weights(gap, mask.bool(), level)
    torch.testing.assert_close(ours, theirs)
    assert ours.isfinite().all() and (ours[mask.bool()] > 0).all()


def test_what_is_not_trained_may_be_any_number() -> None:
    import torch

    gap, mask = torch.tensor([[math.nan, 0.0], [math.inf, math.inf]]), torch.tensor([[0, 1], [0, 0]]).bool()
    for level in ("token", "sequence"):
        assert importance_weights(gap, mask, level).tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_masked_tokens_leave_the_loss_and_its_denominator() -> None:
    """The mean is one over what is trained: both of verl's masks come from ``loss_mask``."""
    corrected, metrics = without_far_tokens(SAMPLES, algorithm(level="token", mask_outside=[0.5, 2.5]))
    assert corrected[0].loss_mask == (0, 1, 0, 0)
    assert corrected[2].loss_mask == (1, 1, 0, 1, 0, 1)
    assert corrected[0].num_sampled_tokens == 1
    assert corrected[0].turns == (-1, 0, -1, -1)
    assert metrics["learn/weight_masked_fraction"] == pytest.approx(3 / 9)
    # What is left out, the environment's tokens too, has no number in any column.
    assert corrected[0].old_logprobs == pytest.approx((0.0, -1.0, 0.0, 0.0))
    assert corrected[0].rollout_logprobs == (0.0, -1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"mask_outside": [0.5, None], "truncate_above": 2.0}, [2, 1, 5]),
        ({"mask_outside": [None, 2.5]}, [2, 1, 4]),
        ({"mask_outside": [None, 4.0], "truncate_above": 2.0}, [3, 1, 4]),
    ],
)
def test_bounds_may_be_one_sided_or_of_both_kinds(bounds: dict[str, object], kept: list[int]) -> None:
    corrected, _ = without_far_tokens(SAMPLES, algorithm(level="token", **bounds))
    assert [each.num_sampled_tokens for each in corrected] == kept


def test_masked_sequence_comes_back_empty() -> None:
    settings = algorithm(level="sequence", mask_outside=[0.8, 2.0])
    corrected, metrics = without_far_tokens(SAMPLES, settings)
    # The products are 0.75, 1.1 and 2.16.
    assert [each.num_sampled_tokens for each in corrected] == [0, 1, 0]
    assert metrics["learn/weight_masked_fraction"] == pytest.approx(8 / 9)
    nothing, metrics = without_far_tokens(SAMPLES[:1], settings)
    assert nothing[0].num_sampled_tokens == 0
    assert metrics["learn/weight_masked_fraction"] == 1.0


def test_without_bounds_nothing_is_left_out() -> None:
    for correction in ({}, {"level": "bypass"}, {"level": "token", "truncate_above": 2.0}):
        assert without_far_tokens(SAMPLES, algorithm(**correction)) == (SAMPLES, {})
    assert without_far_tokens([], algorithm(level="token", mask_outside=[None, 2.0])) == ([], {})


def resolved(max_staleness: int, **correction: object) -> tuple[str | None, float | None]:
    config = AlgorithmConfig(correction=CorrectionConfig(**correction))
    settings = resolve(config, 64, max_staleness=max_staleness)
    return settings.correction_level, settings.truncate_above


def test_tokens_of_older_policies_are_corrected_by_default() -> None:
    assert resolved(0) == (None, None)
    assert resolved(2) == ("token", 2.0)
    assert resolved(2, level="none") == (None, None)
    assert resolved(2, level="bypass") == (None, None), "the ratio of the loss corrects"
    assert resolved(2, truncate_above=5.0) == ("token", 5.0)
    assert resolved(2, mask_outside=[None, 5.0]) == ("token", None), "what is masked needs no truncation"


def test_coarser_rounding_is_corrected_by_default() -> None:
    rounded = resolve(AlgorithmConfig(), 64, is_exact=False)
    assert (rounded.correction_level, rounded.truncate_above) == ("token", 2.0)
    off = AlgorithmConfig(correction=CorrectionConfig(level="none"))
    assert resolve(off, 64, is_exact=False).correction_level is None


def test_weights_have_an_upper_bound_also_where_none_is_set() -> None:
    assert resolved(0, level="sequence") == ("sequence", 2.0)
    assert resolved(0, level="token", mask_outside=[0.5, None]) == ("token", 2.0)


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"level": "bypas"}, r"correction\.level='bypas' .* Did you mean 'bypass'"),
        ({"level": "turn", "truncate_above": 2.0}, r"correction\.level='turn' is not one of token, sequence"),
        ({"level": "none", "truncate_above": 2.0}, r"truncate_above=2\.0 has no effect with .*level=none"),
        ({"truncate_above": 2.0}, r"truncate_above=2\.0 has no effect with .*level=null: set it to token"),
        ({"mask_outside": [0.5, None]}, r"mask_outside=\[0\.5, None\] has no effect with .*level=null"),
        (
            {"level": "bypass", "truncate_above": 2.0},
            r"truncate_above=2\.0 .*=bypass, where every weight",
        ),
        ({"level": "bypass", "mask_outside": [None, 2.0]}, r"mask_outside=.* no effect with .*level=bypass"),
        ({"level": "token", "truncate_above": 0.5}, r"truncate_above=0\.5 has to be at least 1"),
        (
            {"level": "token", "mask_outside": [None, 0.5]},
            r"mask_outside=\[None, 0\.5\] would leave out a weight",
        ),
        (
            {"level": "token", "mask_outside": [1.5, 2.0]},
            r"mask_outside=\[1\.5, 2\.0\] would leave out a weight of 1.*lower bound is at most 1",
        ),
        (
            {"level": "token", "mask_outside": [0.0, 2.0]},
            r"mask_outside\[0\]=0\.0 has to be above 0",
        ),
        (
            {"level": "token", "truncate_above": 3.0, "mask_outside": [None, 2.0]},
            r"truncate_above=3\.0 has no effect with algorithm\.correction\.mask_outside=\[None, 2\.0\]",
        ),
    ],
)
def test_what_makes_no_sense_of_a_correction_is_refused(correction: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**correction)
