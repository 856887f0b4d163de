"""Every loss is the formula cited here, however the batch is cut into micro-batches and spread over ranks.

The references go token by token over plain lists; what is compared is the loss and its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from learner_samples import RESPONSE_TOKENS, ragged_samples, with_random_columns
from whole_batches import shards

from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

LOW, HIGH = 0.2, 0.28
Tokens = list[torch.Tensor]
"""One tensor [number of sampled tokens] per sample."""


Samples = tuple[TrainingSample, ...]


def some_samples() -> Samples:
    """Seven that are trained, and one of which a correction has masked everything."""
    filled = with_random_columns(ragged_samples(8, most=40))
    return (*filled[:-1], replace(filled[-1], loss_mask=(0,) * len(filled[-1].loss_mask)))


SAMPLES = some_samples()
ONE_ADVANTAGE_EACH = tuple(
    replace(sample, advantages=tuple(0.5 * (-1) ** index * bit for bit in sample.loss_mask))
    for index, sample in enumerate(SAMPLES)
)


def algorithm(**settings: Any) -> Algorithm:
    """``settings`` by hand: the tests look at the losses alone, not at what goes with which."""
    return replace(resolve(AlgorithmConfig(), RESPONSE_TOKENS), clip_low=LOW, clip_high=HIGH, **settings)


def column(name: str, samples: Samples = SAMPLES) -> Tokens:
    """A column of the trained samples, sampled tokens alone."""
    every = {
        "advantages": [each.advantages for each in samples],
        "old": [each.old_logprobs for each in samples],
        "reference": [each.reference_logprobs for each in samples],
        "engine": [each.rollout_logprobs for each in samples],
        "values": [each.values for each in samples],
        "returns": [each.returns for each in samples],
    }[name]
    masks = [torch.tensor(each.loss_mask, dtype=torch.bool) for each in samples]
    return [torch.tensor(row)[mask] for row, mask in zip(every, masks, strict=True) if mask.any()]


def new_logprobs(seed: int = 1) -> Tokens:
    """[P + R] per sample: what the model says now of each next token; leaves.

    Two of three tokens are near the old policy, the third one up to 8 nats away.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sample in SAMPLES:
        row = torch.rand(len(sample), generator=generator) - 5.5
        start = len(sample.prompt_ids) - 1
        moved = 0.7 * torch.randn(len(sample.response_ids), generator=generator)
        moved[::3] = 16 * torch.rand(len(moved[::3]), generator=generator) - 8
        row[start : start + len(moved)] = torch.tensor(sample.old_logprobs) + moved
        rows.append(row.requires_grad_())
    return rows


def sampled_tokens(rows: Tokens) -> Tokens:
    """Of what the model says [P + R], that of the sampled tokens: one before each of them."""
    picked = []
    for row, sample in zip(rows, SAMPLES, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        start = len(sample.prompt_ids) - 1
        if mask.any():
            picked.append(row[start : start + len(mask)][mask])
    return picked


# -- what verl computes, cut into micro-batches and over ranks ------------------------------------------

CUTS = [(1, 100_000), (1, 200), (2, 200)]
"""Ranks, and tokens of a micro-batch."""


def through_verl(
    loss: Callable[..., Any],
    columns: dict[str, str],
    outputs: dict[str, Tokens],
    cut: tuple[int, int],
    samples: Samples = SAMPLES,
) -> tuple[float, list[dict[str, Any]]]:
    """The batch's loss, its gradient added to ``outputs``, and the metrics of every micro-batch."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    from policies.learning.verl.data import scored

    num_ranks, max_tokens = cut
    batch = TrainBatch(samples=samples)
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    total, metrics = torch.tensor(0.0), []
    for share in shards(batch, num_ranks, max_tokens, 384, [*columns]):
        indices = [branch.sample for row in share.rows for branch in row]
        data = scored(share, columns)
        tu.assign_non_tensor(
            data,
            dp_size=num_ranks,
            batch_num_tokens=sum(sample.num_sampled_tokens for sample in batch.samples),
            max_token_len_per_gpu=max_tokens,
            use_dynamic_bsz=True,
        )
        micro_batches, positions = prepare_micro_batches(data)
        if max_tokens < 1000:
            assert len(micro_batches) > 1
        for micro_batch, rows in zip(micro_batches, positions, strict=True):
            model_output = {
                name: nested([tensors[indices[row]] for row in rows]) for name, tensors in outputs.items()
            }
            part, reported = loss(model_output=model_output, data=micro_batch)
            total = total + part / num_ranks  # FSDP takes the mean of the ranks' gradients
            metrics.append(reported)
    total.backward()
    return total.item(), metrics


def policy_loss_through_verl(
    settings: Algorithm,
    outputs: dict[str, Tokens],
    cut: tuple[int, int],
    samples: Samples = SAMPLES,
) -> tuple[float, list[dict[str, Any]]]:
    from policies.learning.division import OLD_LOGPROBS, policy_columns
    from policies.learning.verl.config import actor_config
    from policies.learning.verl.losses import policy_loss

    columns = policy_columns(settings) | OLD_LOGPROBS
    loss = partial(policy_loss, settings, actor_config(LearnerConfig(), settings))
    return through_verl(loss, columns, outputs, cut, samples)


def batch_mean(parts: list[dict[str, Any]], cut: tuple[int, int], name: str) -> float:
    """A metric of the whole batch, of the shares that its micro-batches have reported."""
    return sum(part[name].aggregate() for part in parts) / cut[0]


# -- the papers' formulas ------------------------------------------------------------------------------


def clip(ratio: torch.Tensor) -> torch.Tensor:
    return ratio.clamp(1 - LOW, 1 + HIGH)


def vanilla(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Schulman et al. 2017 (PPO), equation 7, with the lower bound c = 3 where the advantage is negative:
    Ye et al. 2020 (Mastering Complex Control in MOBA Games with Deep RL), the dual clip.
    """
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantage, clip(ratio) * advantage)
    return -torch.where(advantage < 0, torch.maximum(surrogate, 3 * advantage), surrogate)


def gspo(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Zheng et al. 2025 (GSPO), equation 7: one ratio a sequence; the gradient is section 4.3's."""
    ratio = (new - old).mean().exp().detach() * (new - new.detach()).exp()
    return -torch.minimum(ratio * advantage, clip(ratio) * advantage)


def cispo(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """MiniMax 2025 (MiniMax-M1), equation 4."""
    return -clip((new - old).exp()).detach() * advantage * new


def gpg(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Chu et al. 2025 (GPG, arXiv 2504.02546): REINFORCE, without a ratio."""
    return -advantage * new


def reinforce(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Williams 1992: the log-probability of a sequence times its advantage; so in RLOO (Ahmadian et al.
    2024), ReMax (Li et al. 2023) and OPO (Hao et al. 2025).
    """
    return -advantage * new


def sapo(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Gao et al. 2025 (SAPO, arXiv 2511.20347): a sigmoid gate, with the temperatures 1 and 1.05."""
    tau = torch.where(advantage > 0, 1.0, 1.05)
    return -torch.sigmoid(tau * ((new - old).exp() - 1)) * 4 / tau * advantage


def geo_mean(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Zhao et al. 2025 (GMPO, arXiv 2507.20673): the geometric mean of clipped ratios, one a sequence."""
    log_ratio, sign = new - old, advantage.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-LOW, HIGH))
    return -(clipped.mean().exp() * advantage.mean()).reshape(1)


AGGREGATIONS: dict[str, Callable[[Tokens], torch.Tensor]] = {
    "token-mean": lambda rows: torch.cat(rows).mean(),
    "token-sum": lambda rows: torch.cat(rows).sum(),
    "seq-mean-token-sum": lambda rows: torch.stack([row.sum() for row in rows]).mean(),
    "seq-mean-token-mean": lambda rows: torch.stack([row.mean() for row in rows]).mean(),
    "seq-mean-token-sum-norm": lambda rows: torch.stack([row.sum() for row in rows]).mean() / RESPONSE_TOKENS,
}
"""Liu et al. 2025 (Dr. GRPO), section 3, compares them."""

LOSSES = [
    *[(vanilla, aggregation) for aggregation in AGGREGATIONS],
    (gspo, "seq-mean-token-mean"),
    (cispo, "token-mean"),
    (gpg, "token-mean"),
    (reinforce, "seq-mean-token-sum"),
    (sapo, "seq-mean-token-mean"),
    (geo_mean, "seq-mean-token-mean"),
]


def gradient(rows: Tokens) -> torch.Tensor:
    return torch.cat([row.grad if row.grad is not None else torch.zeros_like(row) for row in rows])


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "micro-batches", "two ranks"])
@pytest.mark.parametrize(
    ("formula", "aggregation"), LOSSES, ids=lambda value: getattr(value, "__name__", value)
)
def test_policy_loss_is_the_formula(formula: Any, aggregation: str, cut: tuple[int, int]) -> None:
    expected_rows, rows = new_logprobs(), new_logprobs()
    samples = ONE_ADVANTAGE_EACH if formula is geo_mean else SAMPLES  # its paper knows no other
    advantages = column("advantages", samples)
    losses = [
        formula(new, old, advantage)
        for new, old, advantage in zip(sampled_tokens(expected_rows), column("old"), advantages, strict=True)
    ]
    expected = AGGREGATIONS[aggregation](losses)
    expected.backward()
    settings = algorithm(loss=formula.__name__, loss_aggregation=aggregation)
    loss, _ = policy_loss_through_verl(settings, {"log_probs": rows}, cut, samples=samples)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient(rows), gradient(expected_rows), rtol=1e-5, atol=1e-7)


def in_pieces(samples: Samples, rows: Tokens) -> tuple[Samples, Tokens]:
    """The same trajectories, of which every other one has a sample for each four tokens of its response."""
    pieces, their_rows = [], []
    for index, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        length, before = len(sample.response_ids), len(sample.prompt_ids)
        starts = range(0, length, 4) if index % 2 else (0,)
        for part, start in enumerate(starts):
            end = min(start + 4, length) if index % 2 else length
            names = ("response_ids", "loss_mask", "turns", "rollout_logprobs", "old_logprobs")
            names += ("reference_logprobs", "advantages", "values", "returns")
            columns = {name: getattr(sample, name)[start:end] for name in names}
            pieces.append(replace(sample, sample_id=f"g/{index}#{part}", **columns))
            told = torch.cat([row[: before - 1], row[before - 1 + start : before - 1 + end], row[:1]])
            their_rows.append(told)
    return tuple(pieces), their_rows


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "micro-batches", "two ranks"])
@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        *[("vanilla", aggregation) for aggregation in AGGREGATIONS],
        ("reinforce", "seq-mean-token-sum"),
        ("cispo", "seq-mean-token-mean"),
        ("sapo", "seq-mean-token-mean"),
    ],
)
def test_trajectory_counts_once_however_often_rewritten(
    loss: str, aggregation: str, cut: tuple[int, int]
) -> None:
    """The same tokens with the same log-probabilities teach the same, in one sample or in several."""
    settings = algorithm(
        loss=loss,
        loss_aggregation=aggregation,
        kl_place="loss",
        kl_coef=0.3,
        kl_estimator="k3",
        entropy_coef=0.1,
    )
    whole, split = new_logprobs(), new_logprobs()
    entropy, split_entropy = new_logprobs(2), new_logprobs(2)
    expected, _ = policy_loss_through_verl(settings, {"log_probs": whole, "entropy": entropy}, CUTS[0])
    samples, rows = in_pieces(SAMPLES, split)
    _, entropy_rows = in_pieces(SAMPLES, split_entropy)
    of_padding = torch.zeros(2)
    outputs = {"log_probs": [*rows, of_padding], "entropy": [*entropy_rows, of_padding]}
    found, _ = policy_loss_through_verl(settings, outputs, cut, samples=samples)
    assert len(samples) > 2 * len(SAMPLES)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient(split), gradient(whole), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient(split_entropy), gradient(entropy), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_ratio_of_rare_token_is_cut_where_paper_cuts_it(loss: str) -> None:
    """arXiv 2602.04879, section 5.4: at 20. From 0.001 to 0.0074 no divergence is near its threshold."""
    from policies.learning.verl.config import actor_config

    sample = replace(
        SAMPLES[0],
        **dict.fromkeys(("rollout_logprobs", "old_logprobs", "advantages"), (0.0,)),
        response_ids=(7,),
        loss_mask=(1,),
    )
    sample = replace(sample, old_logprobs=(math.log(0.001),), advantages=(1.0,))
    row = torch.zeros(len(sample))
    row[len(sample.prompt_ids) - 1] = math.log(0.001) + 2
    rows = [row.requires_grad_()]
    policy_loss_through_verl(algorithm(loss=loss), {"log_probs": rows}, CUTS[0], samples=(sample,))
    assert float(gradient(rows).sum()) == pytest.approx(-math.exp(2), rel=1e-5)
    set_by_hand = LearnerConfig(verl={"actor": {"clip_ratio_c": 5.0}})
    assert actor_config(set_by_hand, algorithm(loss=loss)).clip_ratio_c == 5.0
    assert actor_config(LearnerConfig(), algorithm()).clip_ratio_c == 3.0


TRUNCATE_ABOVE = 1.3


def importance_weights(level: str) -> Tokens:
    """Before they are cut: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL
    training; of a sequence, Ionides 2008, Truncated Importance Sampling."""
    gaps = [old - engine for old, engine in zip(column("old"), column("engine"), strict=True)]
    return [(gap if level == "token" else gap.sum().expand_as(gap)).exp() for gap in gaps]


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "micro-batches", "two ranks"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_multiply_each_tokens_loss(level: str, cut: tuple[int, int]) -> None:
    expected_rows, rows = new_logprobs(), new_logprobs()
    weights = importance_weights(level)
    losses = [
        weight.clamp(max=TRUNCATE_ABOVE) * vanilla(new, old, advantage)
        for new, old, advantage, weight in zip(
            sampled_tokens(expected_rows), column("old"), column("advantages"), weights, strict=True
        )
    ]
    expected = torch.cat(losses).mean()
    expected.backward()
    settings = algorithm(correction_level=level, truncate_above=TRUNCATE_ABOVE)
    loss, parts = policy_loss_through_verl(settings, {"log_probs": rows}, cut)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient(rows), gradient(expected_rows), rtol=1e-5, atol=1e-7)

    total = partial(batch_mean, parts, cut)
    untouched = torch.cat(weights)
    used = untouched.clamp(max=TRUNCATE_ABOVE)
    assert 0.1 < (used < untouched).float().mean() < 0.9
    assert total("weight_mean") == pytest.approx(float(untouched.mean()), rel=1e-5)
    assert max(part["weight_max"].aggregate() for part in parts) == pytest.approx(float(untouched.max()))
    assert total("weight_truncated_fraction") == pytest.approx(float((used < untouched).float().mean()))
    assert total("weight_used_mean") == pytest.approx(float(used.mean()), rel=1e-5)
    assert total("weight_used_square") == pytest.approx(float(used.square().mean()), rel=1e-5)


KL_TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": lambda new, reference: new - reference,
    "abs": lambda new, reference: (new - reference).abs(),
    "k2": lambda new, reference: (new - reference) ** 2 / 2,
    "k3": lambda new, reference: (reference - new).exp() - (reference - new) - 1,
}
"""Schulman 2020, Approximating KL divergence."""


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "micro-batches", "two ranks"])
@pytest.mark.parametrize("estimator", [*KL_TERMS, "k1+", "k3+"])
def test_kl_and_entropy_are_added_to_the_loss(estimator: str, cut: tuple[int, int]) -> None:
    """With a plus the value is the estimator's, and the gradient k2's, which is that of the KL itself."""
    expected_rows, rows = new_logprobs(), new_logprobs()
    expected_entropy, entropy = new_logprobs(2), new_logprobs(2)
    new, old = sampled_tokens(expected_rows), column("old")
    policy = torch.cat([vanilla(*each) for each in zip(new, old, column("advantages"), strict=True)]).mean()
    pairs = list(zip(new, column("reference"), strict=True))
    kl = torch.cat([KL_TERMS[estimator.rstrip("+")](*pair) for pair in pairs]).mean()
    moved_by = torch.cat([KL_TERMS["k2"](*pair) for pair in pairs]).mean() if "+" in estimator else kl
    bonus = torch.cat(sampled_tokens(expected_entropy)).mean()
    expected = policy + 0.3 * kl - 0.1 * bonus
    (policy + 0.3 * moved_by - 0.1 * bonus).backward()
    settings = algorithm(kl_place="loss", kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1)
    loss, _ = policy_loss_through_verl(settings, {"log_probs": rows, "entropy": entropy}, cut)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient(rows), gradient(expected_rows), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient(entropy), gradient(expected_entropy), rtol=1e-5, atol=1e-7)


def test_k3_pulls_token_back_however_far_below_reference_it_is() -> None:
    """verl's k3 stops at 10: its gradient is 0 from 2.61 nats on."""
    from policies.learning.kl import kl_estimate

    policy = torch.tensor([-1.0, -3.0, -4.0, -9.0, -21.0], requires_grad=True)
    reference = torch.full((5,), -1.0)
    kl_estimate(policy, reference, "k3").sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, 1 - (reference - policy.detach()).exp())


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "micro-batches", "two ranks"])
def test_value_loss_is_ppos(cut: tuple[int, int]) -> None:
    """The clipped squared error of PPO's implementations (Engstrom et al. 2020, section 3), halved."""
    from policies.learning.division import VALUE_COLUMNS
    from policies.learning.verl.config import critic_config
    from policies.learning.verl.critic import clipped_value_loss

    expected_rows, rows = (
        [(row.detach() + 5).requires_grad_() for row in new_logprobs()] for _ in range(2)
    )  # around the old values
    losses, clips = [], []
    for new, old, returns in zip(
        sampled_tokens(expected_rows), column("values"), column("returns"), strict=True
    ):
        clipped = new.clamp(old - 0.5, old + 0.5)
        losses.append(torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) / 2)
        clips.append((clipped - returns) ** 2 > (new - returns) ** 2)
    expected = torch.cat(losses).mean()
    expected.backward()
    config = critic_config(LearnerConfig(critic={"clip_range": 0.5}))
    loss, parts = through_verl(partial(clipped_value_loss, config), VALUE_COLUMNS, {"values": rows}, cut)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient(rows), gradient(expected_rows), rtol=1e-5, atol=1e-7)
    share = torch.cat(clips).float().mean().item()
    assert 0.05 < share < 0.95
    assert batch_mean(parts, cut, "clip_fraction") == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "micro-batches", "two ranks"])
def test_metrics_are_means_over_the_tokens_of_the_whole_batch(cut: tuple[int, int]) -> None:
    rows = new_logprobs()
    new, old, advantages = (
        torch.cat(tokens).detach() for tokens in (sampled_tokens(rows), column("old"), column("advantages"))
    )
    ratio = (new - old).exp()
    _, parts = policy_loss_through_verl(algorithm(), {"log_probs": rows}, cut)

    total = partial(batch_mean, parts, cut)
    low = ((ratio < 1 - LOW) & (advantages < 0)).float().mean()
    high = ((ratio > 1 + HIGH) & (advantages > 0)).float().mean()
    dual = ((ratio > 3) & (advantages < 0)).float().mean()
    assert low > 0.05
    assert high > 0.05
    assert dual > 0.05
    assert total("clip_fraction_low") == pytest.approx(float(low), rel=1e-5)
    assert total("clip_fraction_high") == pytest.approx(float(high), rel=1e-5)
    assert total("clip_fraction_dual") == pytest.approx(float(dual), rel=1e-5)
    assert total("clip_fraction") == pytest.approx(float(low + high + dual), rel=1e-5)
    assert total("kl") == pytest.approx(float((old - new).mean()), rel=1e-5)
    assert total("ratio_mean") == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert max(part["ratio_max"].aggregate() for part in parts) == pytest.approx(float(ratio.max()), rel=1e-5)


def test_loss_that_clips_nothing_has_no_clip_fraction() -> None:
    _, parts = policy_loss_through_verl(algorithm(loss="gpg"), {"log_probs": new_logprobs()}, CUTS[0])
    assert "clip_fraction" not in parts[0]
    assert math.isfinite(parts[0]["ratio_mean"].aggregate())
