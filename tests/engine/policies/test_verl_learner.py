"""The learner on one rank, in this process: scores, updates, reference policy, adapters, checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from learner_samples import batches, ragged_samples, save, with_random_columns
from transformers_reference import load, token_logprobs, weights_of

from environments.errors import ConfigError, LearnerError
from policies.learning.credit import explained_variance
from policies.learning.samples import TrainBatch, TrainingSample, padding_sample
from policies.learning.settings import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    LearnerConfig,
    LoRAConfig,
    OptimizerConfig,
)

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

FROZEN = OptimizerConfig(lr=0.0)
FAST = OptimizerConfig(lr=1e-3)
WITH_REFERENCE = AlgorithmConfig(kl=KLConfig(place="loss", coef=0.1, estimator="k3"))
ADAPTED = LearnerConfig(lora=LoRAConfig(rank=4))
QLORA = LearnerConfig(
    lora=LoRAConfig(rank=4),
    verl={"model": {"override_config": {"quantization_config": {"load_in_4bit": True}}}},
)
KINDS = {"policy": LearnerConfig(), "adapters": ADAPTED}


def weights(rank: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in rank.weights()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def step(rank: Any, optimizer: OptimizerConfig = FAST) -> Any:
    """One update from a fresh optimizer."""
    rank.begin_phase(optimizer, 100)
    return rank.update(rank.score(batches()))


def old_logprobs(rank: Any, batch: TrainBatch | None = None) -> list[tuple[float, ...]]:
    """The learner's log-probabilities of the sampled tokens, and 0 for the others."""
    return [
        tuple(value * bit for value, bit in zip(row, sample.loss_mask, strict=True))
        for each in ([batch] if batch else batches())
        for row, sample in zip(rank.logprobs(each), each.samples, strict=True)
    ]


def with_old_logprobs(rank: Any, batch: TrainBatch) -> TrainBatch:
    rows = zip(batch.samples, old_logprobs(rank, batch), strict=True)
    return replace(batch, samples=tuple(replace(sample, old_logprobs=row) for sample, row in rows))


def reference_logprobs(rank: Any) -> list[tuple[float, ...]]:
    return [sample.reference_logprobs for batch in rank.score(batches()) for sample in batch.samples]


# -- score and update ----------------------------------------------------------------------------------


def test_score_is_the_log_probability_of_the_sampled_tokens(make_rank: MakeRank, tiny_model: Path) -> None:
    batch = TrainBatch(samples=ragged_samples(), temperature=0.7)
    scored = make_rank(LearnerConfig(micro_batch_tokens=200)).score([batch, batch])[1]
    model = load(tiny_model)
    for sample in scored.samples:
        with torch.no_grad():
            expected = token_logprobs(model, sample.prompt_ids, sample.response_ids, 0.7)
        expected *= torch.tensor(sample.loss_mask)
        torch.testing.assert_close(torch.tensor(sample.old_logprobs), expected, rtol=0, atol=1e-4)
    blank = [replace(sample, old_logprobs=()) for sample in scored.samples]
    assert blank == list(batch.samples)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("level", ["none", "token", "sequence"])
def test_first_mini_batch_needs_no_score_and_changes_no_bit(
    make_rank: MakeRank, name: str, level: str
) -> None:
    algorithm = AlgorithmConfig(name=name, correction=CorrectionConfig(level=level))
    ranks = [make_rank(algorithm=algorithm) for _ in range(2)]
    for _ in range(2):
        unscored, scored = (rank.score(batches(2)) for rank in ranks)
        assert not any(sample.old_logprobs for sample in unscored[0].samples)
        assert all(sample.old_logprobs for sample in unscored[1].samples)
        scored[0] = with_old_logprobs(ranks[1], scored[0])
        assert ranks[0].update(unscored) == ranks[1].update(scored)
    assert_same(weights(ranks[0]), weights(ranks[1]))


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(correction=CorrectionConfig(level="token", mask_outside=[None, 2.0])),
        AlgorithmConfig(kl=KLConfig(place="reward", coef=0.1)),
    ],
)
def test_masks_and_penalty_need_the_first_mini_batch_scored(
    make_rank: MakeRank, algorithm: AlgorithmConfig
) -> None:
    scored = make_rank(algorithm=algorithm).score(batches(2))
    assert all(sample.old_logprobs for batch in scored for sample in batch.samples)


def test_second_epoch_has_the_old_policy_of_before_the_update(make_rank: MakeRank) -> None:
    rank = make_rank(LearnerConfig(num_epochs=2, optimizer=FAST))
    scored = rank.score(batches())
    before = old_logprobs(rank)
    assert [sample.old_logprobs for batch in scored for sample in batch.samples] == before
    taken = [*scored, *scored[::-1]]
    update = rank.update(taken)
    assert update.num_optimizer_steps == 4
    assert update.metrics["learn/lr"] == FAST.lr, "one step of the schedule for all epochs"
    by_hand = make_rank(LearnerConfig(optimizer=FAST))  # a step at a time, each to the same old policy
    for batch in taken:
        by_hand.update([batch])
    assert_same(weights(rank), weights(by_hand))


def test_mini_batch_that_comes_twice_has_to_be_scored(make_rank: MakeRank) -> None:
    rank = make_rank()
    scored = rank.score(batches(1))
    with pytest.raises(LearnerError, match=r"Sample '\d' has 0 old_logprobs for \d+ response tokens: score"):
        rank.update([*scored, *scored])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_learning_rate_of_zero_leaves_ratio_and_weights_alone(
    make_rank: MakeRank, tiny_model: Path, temperature: float
) -> None:
    rank = make_rank(LearnerConfig(micro_batch_tokens=200, optimizer=FROZEN))
    batch = TrainBatch(samples=ragged_samples(), temperature=temperature)
    scored = rank.score([batch, batch])  # the second would see what the first has done
    update = rank.update(scored)
    assert update.num_optimizer_steps == 2
    assert update.metrics["learn/ratio_max"] == 1
    assert update.metrics["learn/ratio_mean"] == pytest.approx(1, abs=1e-12)  # a mean of means
    assert update.metrics["learn/kl"] == update.metrics["learn/clip_fraction"] == 0
    assert update.metrics["learn/grad_norm"] > 0
    assert rank.score([batch, batch]) == scored
    assert_same(weights(rank), weights_of(tiny_model))


def test_dropout_is_switched_off(
    make_rank: MakeRank, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``score`` and ``update`` would see different policies: the ratio was 22 before anything was learned."""
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    rank = make_rank(LearnerConfig(optimizer=FROZEN), model=tmp_path)
    metrics = rank.update(rank.score(batches(1))).metrics
    assert metrics["learn/ratio_mean"] == metrics["learn/ratio_max"] == 1
    assert "attention_dropout=0.5: it is trained without" in caplog.text


@pytest.mark.parametrize("where", ["config", "modules"])
def test_dropout_is_found_under_any_name(where: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from policies.learning.verl.worker import switch_off_in_config, switch_off_in_modules

    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, **rates)
    if where == "config":
        switch_off_in_config(config)
    model = GPT2LMHeadModel(config).train()
    if where == "modules":
        switch_off_in_modules(model)
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_learning_rate_above_zero_moves_both(make_rank: MakeRank, tiny_model: Path) -> None:
    """The counterpart of the test before: its assertions do fail once something is learned."""
    rank = make_rank()
    before = old_logprobs(rank)
    metrics = step(rank).metrics
    assert metrics["learn/ratio_max"] > 1.01
    assert abs(metrics["learn/kl"]) > 1e-4
    assert old_logprobs(rank) != before


def expected_grad_norm(model_path: Path, samples: Sequence[TrainingSample]) -> float:
    """The norm of the policy gradient, averaged over tokens, where the ratio is 1: by autograd alone."""
    model = load(model_path)
    losses, count = [], 0
    for sample in samples:
        logprobs = token_logprobs(model, sample.prompt_ids, sample.response_ids, temperature=1.0)
        losses.append(-(torch.tensor(sample.advantages) * logprobs).sum())
        count += sum(sample.loss_mask)
    (sum(losses) / count).backward()
    return float(torch.stack([each.grad.norm() for each in model.parameters()]).norm())


def test_gradient_depends_on_neither_micro_batches_nor_padding(make_rank: MakeRank, tiny_model: Path) -> None:
    norms = []
    for micro_batch_tokens in (16384, 200, 120):
        rank = make_rank(LearnerConfig(micro_batch_tokens=micro_batch_tokens, optimizer=FROZEN))
        for rows in (0, 3):
            batch = TrainBatch(samples=ragged_samples() + (padding_sample(1),) * rows)
            norms.append(rank.update(rank.score([batch])).metrics["learn/grad_norm"])
    assert norms == pytest.approx([norms[0]] * 6, rel=1e-5)
    assert norms[0] == pytest.approx(expected_grad_norm(tiny_model, ragged_samples()), rel=1e-4)


def test_logits_are_made_only_where_a_response_is_predicted(make_rank: MakeRank) -> None:
    """Of all columns that the rows of a micro-batch need: prompts of 40 and 44 tokens, responses of 5."""
    rank, shapes = make_rank(), []
    rank.engine.module.register_forward_hook(lambda *call: shapes.append(tuple(call[-1].logits.shape[:2])))
    samples = tuple(
        replace(sample, prompt_ids=(size,) * size, **{name: getattr(sample, name)[:5] for name in COLUMNS})
        for sample, size in zip(ragged_samples(2), (40, 44), strict=True)
    )
    rank.update([with_old_logprobs(rank, TrainBatch(samples=samples))])
    rank.fit([TrainBatch(samples=samples)])
    assert shapes == [(2, 9)] * 3


@pytest.mark.parametrize("kind", ["policy", "adapters", "critic"])
def test_what_samples_share_is_computed_once(
    make_rank: MakeRank, make_critic_rank: MakeRank, kind: str
) -> None:
    """Scores, values, those of the reference, and what is learned are those of flat rows."""
    samples = ragged_samples(8)
    prompts = [tuple(range(5, 65)), samples[5].prompt_ids]
    shared = [
        replace(sample, prompt_ids=prompts[index % 2], advantages=advantages_of(sample))
        for index, sample in enumerate(samples)
    ]
    batch = TrainBatch(samples=with_random_columns(shared))
    results, tokens = [], []
    for has_trees in (True, False):
        rank = make_critic_rank() if kind == "critic" else make_rank(KINDS[kind], WITH_REFERENCE)
        assert rank.pairs_per_token == 384
        if not has_trees:
            rank.pairs_per_token = 0
        sizes: list[int] = []
        rank.engine.module.register_forward_pre_hook(
            lambda _, args, kwargs, sizes=sizes: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        rank.update([batch])
        scores = rank.values([batch])[0] if kind == "critic" else rank.logprobs(batch)
        if kind != "critic":
            scores += [sample.reference_logprobs for sample in rank.score([batch])[0].samples]
        results.append((scores, weights(rank)))
        tokens.append(sum(sizes))
    assert tokens[0] < 0.6 * tokens[1]
    (scores, moved), (expected, expected_moved) = results
    for row, expected_row in zip(scores, expected, strict=True):
        assert list(row) == pytest.approx(list(expected_row), abs=1e-5)
    for name, tensor in moved.items():
        assert torch.allclose(tensor, expected_moved[name], atol=1e-6), name


def test_model_that_cannot_share_prefixes_says_so_once(
    make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    make_rank()
    assert "computed for each of them" not in caplog.text
    rank = make_rank(LearnerConfig(verl={"model": {"override_config": {"attn_implementation": "eager"}}}))
    rank.logprobs(batches()[0])
    assert caplog.text.count("computed for each of them: its attention is eager, not sdpa.") == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_token_sees_its_own_future_or_another_response(make_rank: MakeRank, attention: str) -> None:
    """Whichever attention is set: transformers' own does not heed the mask of a shared prompt."""
    rank = make_rank(LearnerConfig(verl={"model": {"override_config": {"attn_implementation": attention}}}))
    shared = [replace(sample, prompt_ids=tuple(range(5, 65))) for sample in ragged_samples(4)]
    together = rank.logprobs(TrainBatch(samples=tuple(shared)))
    for row, sample in zip(together, shared, strict=True):
        assert row == pytest.approx(rank.logprobs(TrainBatch(samples=(sample,)))[0], abs=2e-6)


def advantages_of(sample: TrainingSample) -> tuple[float, ...]:
    """Random ones, where the sample was sampled."""
    return tuple(torch.randn(1).item() * bit for bit in sample.loss_mask)


COLUMNS = ("response_ids", "loss_mask", "rollout_logprobs", "turns", "advantages")
COSINE = OptimizerConfig(lr=1e-3, warmup_steps=2, min_lr_ratio=0.1)
CONSTANT = OptimizerConfig(lr=1e-3, warmup_steps=2)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (COSINE, [0.5, 1, 0.868, 0.55, 0.232, 0.1]),  # half a cosine over the four steps after the warm-up
        (CONSTANT, [0.5, 1, 1, 1, 1, 1]),
        (FAST, [1, 1, 1, 1, 1, 1]),
    ],
    ids=["cosine", "constant", "no warm-up"],
)
def test_each_update_reports_the_rate_that_it_had(
    make_rank: MakeRank, optimizer: OptimizerConfig, expected: list[float]
) -> None:
    rank = make_rank()
    rank.begin_phase(optimizer, 6)
    rates = []
    for _ in expected:
        before = weights(rank)
        rates.append(rank.update(rank.score(batches(1))).metrics["learn/lr"] / 1e-3)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in rank.weights())
    assert rates == pytest.approx(expected, abs=1e-3)


def test_first_step_of_adam_moves_by_rate_that_is_reported(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.begin_phase(OptimizerConfig(lr=1e-3, warmup_steps=4), 100)
    before = weights(rank)
    rate = rank.update(rank.score(batches(1))).metrics["learn/lr"]
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in rank.weights())
    assert moved == pytest.approx(rate, rel=1e-2)


def test_update_is_one_step_of_the_schedule(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.begin_phase(OptimizerConfig(lr=1e-3, warmup_steps=10), 100)
    rates = [rank.update(rank.score(batches(3))).metrics["learn/lr"] for _ in range(2)]
    assert rates == pytest.approx([1e-4, 2e-4])


def test_entropy_is_reported_always_and_exactly_if_rewarded(make_rank: MakeRank, tiny_model: Path) -> None:
    plain, rewarded = make_rank(), make_rank(algorithm=AlgorithmConfig(entropy_coef=0.01))
    scored = [with_old_logprobs(plain, batches(1)[0])]
    estimated, exact = plain.update(scored).metrics, rewarded.update(scored).metrics
    model, entropies, surprises = load(tiny_model), [], []
    for sample in scored[0].samples:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        with torch.no_grad():
            logits = model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0]
        logprobs = logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)[mask]
        entropies.append(-(logprobs.exp() * logprobs).sum(-1))
        surprises.append(-torch.tensor(sample.old_logprobs)[mask])
    assert exact["learn/entropy_bonus"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)
    assert exact["learn/entropy"] == pytest.approx(torch.cat(surprises).mean().item(), rel=1e-4)
    assert estimated["learn/entropy"] == exact["learn/entropy"]
    assert "learn/entropy_bonus" not in estimated


def test_mismatch_is_that_between_engine_and_learner(make_rank: MakeRank) -> None:
    rank = make_rank(LearnerConfig(optimizer=FROZEN))
    true, other = with_old_logprobs(rank, batches(1)[0]).samples[:2]
    off = replace(true, rollout_logprobs=tuple(value + 0.5 for value in true.old_logprobs))
    exact = replace(other, rollout_logprobs=other.old_logprobs)
    metrics = rank.update([TrainBatch(samples=(off, exact))]).metrics
    share = off.num_sampled_tokens / (off.num_sampled_tokens + exact.num_sampled_tokens)
    assert metrics["learn/rollout_logprob_diff_max"] == pytest.approx(0.5, rel=1e-4)
    assert metrics["learn/rollout_logprob_diff_mean"] == pytest.approx(0.5 * share, rel=1e-4)
    assert metrics["learn/rollout_kl"] == pytest.approx(0.5 * share, rel=1e-4)
    assert metrics["learn/rollout_k3_kl"] == pytest.approx((math.exp(-0.5) - 0.5) * share, rel=1e-4)


@pytest.mark.parametrize(
    ("correction", "most"),
    [
        (CorrectionConfig(level="token", truncate_above=1.0), 1.0),
        (
            CorrectionConfig(level="token", mask_outside=[None, 1e6]),
            math.inf,
        ),  # so far that no token is masked
    ],
)
def test_size_of_the_importance_weights_is_told(
    make_rank: MakeRank, correction: CorrectionConfig, most: float
) -> None:
    rank = make_rank(LearnerConfig(optimizer=FROZEN), AlgorithmConfig(correction=correction))
    near = [  # as if the engine had nearly the learner's weights
        replace(
            batch,
            samples=tuple(
                replace(
                    sample,
                    rollout_logprobs=tuple(
                        (value + 0.5 * math.sin(index)) * bit
                        for index, (value, bit) in enumerate(zip(row, sample.loss_mask, strict=True))
                    ),
                )
                for sample, row in zip(batch.samples, rank.logprobs(batch), strict=True)
            ),
        )
        for batch in batches()
    ]
    metrics = rank.update(rank.score(near)).metrics
    weights = [
        torch.tensor(
            [
                math.exp(-0.5 * math.sin(index))
                for sample in batch.samples
                for index, bit in enumerate(sample.loss_mask)
                if bit
            ]
        )
        for batch in near
    ]
    used = [each.clamp(max=most) for each in weights]
    expected = {
        "learn/weight_mean": [each.mean() for each in weights],
        "learn/weight_truncated_fraction": [(each > most).float().mean() for each in weights],
        "learn/weight_effective_fraction": [each.sum() ** 2 / (each**2).sum() / len(each) for each in used],
    }
    lost = (weights[0] / used[0]).log().mean()
    assert metrics["learn/corrected_logprob_diff_mean"] == pytest.approx(float(lost), rel=1e-3, abs=1e-6)
    for name, steps in expected.items():
        assert metrics[name] == pytest.approx(float(torch.stack(steps).mean()), rel=1e-3), name
    assert metrics["learn/weight_max"] == pytest.approx(float(torch.cat(weights).max()), rel=1e-3)


def test_in_bypass_mode_the_old_policy_is_the_engines(make_rank: MakeRank) -> None:
    learner = LearnerConfig(optimizer=FROZEN)
    rank = make_rank(learner, AlgorithmConfig(correction=CorrectionConfig(level="bypass")))
    scored = rank.score(batches(1))
    for sample in scored[0].samples:
        assert sample.old_logprobs == sample.rollout_logprobs
    own = make_rank(learner)
    metrics, measured = rank.update(scored).metrics, own.update(own.score(batches(1))).metrics
    assert metrics["learn/ratio_max"] > 1
    for name in ("learn/rollout_logprob_diff_max", "learn/rollout_logprob_diff_mean"):
        assert metrics[name] == pytest.approx(measured[name], rel=1e-4)


# -- what is refused -----------------------------------------------------------------------------------


def test_samples_that_were_not_scored_are_refused(make_rank: MakeRank) -> None:
    with pytest.raises(LearnerError, match=r"Sample '\d' has 0 old_logprobs for \d+ response tokens: score"):
        make_rank().update(batches())  # the first may come without


def test_sample_that_does_not_fit_through_the_model_is_refused(make_rank: MakeRank) -> None:
    with pytest.raises(
        LearnerError, match=r"has \d+ tokens, but learner.micro_batch_tokens lets 64 .*raise it"
    ):
        make_rank(LearnerConfig(micro_batch_tokens=64)).score(batches())


def test_mini_batch_that_a_correction_has_masked_takes_no_step(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.begin_phase(FAST, 100)
    scored = rank.score(batches())
    masked = TrainBatch(
        samples=tuple(replace(each, loss_mask=(0,) * len(each.loss_mask)) for each in scored[0].samples)
    )
    before = weights(rank)
    nothing = rank.update([masked])
    assert (nothing.num_optimizer_steps, nothing.metrics) == (0, {})
    assert_same(weights(rank), before)
    assert rank.update([masked, scored[1]]).num_optimizer_steps == 1
    with pytest.raises(LearnerError, match="without a single sampled token"):
        rank.fit([masked])


def test_value_that_verl_rejects_is_an_error(make_rank: MakeRank) -> None:
    with pytest.raises(ConfigError, match=r"(?s)verl rejects learner\.verl\.model: .*num_hidden_layers"):
        make_rank(LearnerConfig(verl={"model": {"override_config": {"num_hidden_layers": "x"}}}))


def test_field_that_verl_would_not_read_is_an_error(make_rank: MakeRank) -> None:
    with pytest.raises(ConfigError, match=r"actor.ppo_epochs=2 cannot be set there: set learner.num_epochs"):
        make_rank(LearnerConfig(verl={"actor": {"ppo_epochs": 2}}))


def test_users_fields_go_over_ours_and_dicts_are_merged(make_rank: MakeRank) -> None:
    rank = make_rank(LearnerConfig(verl={"model": {"override_config": {"rms_norm_eps": 1e-3}}}))
    config = rank.engine.module.config
    assert (config.rms_norm_eps, config._attn_implementation) == (1e-3, "sdpa")


def test_bfloat16_learner_keeps_weights_and_moments_in_float32(make_rank: MakeRank) -> None:
    batch, ranks = batches()[0], [make_rank(LearnerConfig(dtype=each)) for each in ("float32", "bfloat16")]
    exact, rounded = (torch.cat([torch.tensor(row) for row in rank.logprobs(batch)]) for rank in ranks)
    assert 1e-5 < (exact - rounded).abs().max() < 0.5, "it computes in bfloat16"
    before = weights(ranks[1])
    step(ranks[1])
    moments = ranks[1].engine.optimizer.state.values()
    kept = [*ranks[1].engine.module.parameters(), *(each["exp_avg"] for each in moments)]
    assert {each.dtype for each in kept} == {torch.float32}
    assert not torch.equal(weights(ranks[1])["model.norm.weight"], before["model.norm.weight"])
    _compute_products(range(1000, 1100))
    before_more = psutil.Process().memory_info().rss
    _compute_products(range(1100, 1400))
    assert psutil.Process().memory_info().rss - before_more < 50e6, "it was 200 MB"


def _compute_products(lengths: range) -> None:
    """Products in bfloat16 of rows of all these lengths."""
    weight = torch.ones(128, 128, dtype=torch.bfloat16)
    for length in lengths:
        torch.nn.functional.linear(torch.ones(length, 128, dtype=torch.bfloat16), weight)


# -- the reference policy ------------------------------------------------------------------------------


@pytest.mark.parametrize("learner", [LearnerConfig(), ADAPTED], ids=["all weights", "adapters"])
def test_reference_is_policy_at_beginning_of_its_phase(make_rank: MakeRank, learner: LearnerConfig) -> None:
    rank = make_rank(learner, WITH_REFERENCE)
    rank.begin_phase(FAST, 100)
    rank.fit(batches())  # a warm start
    rank.begin_phase(FAST, 100)
    beginning = old_logprobs(rank)
    assert reference_logprobs(rank) == beginning
    assert rank.update(rank.score(batches(1))).metrics["learn/kl_loss"] == 0
    assert rank.update(rank.score(batches())).metrics["learn/kl_loss"] > 1e-6
    assert reference_logprobs(rank) == beginning
    assert old_logprobs(rank) != beginning


# -- the teacher ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("learner", [LearnerConfig(), ADAPTED], ids=["all weights", "adapters"])
def test_teacher_scores_tokens_and_stays_as_it_is(
    make_rank: MakeRank, untied_model: Path, tmp_path: Path, learner: LearnerConfig
) -> None:
    options = {"teacher": str(untied_model)}
    rank = make_rank(learner, AlgorithmConfig(name="distillation", options=options))
    teacher = load(untied_model)
    for _ in range(2):
        rank.begin_phase(FAST, 100)
        for batch in (scored := rank.score(batches())):
            for sample in batch.samples:
                expected = token_logprobs(teacher, sample.prompt_ids, sample.response_ids, 1.0)
                masked = expected * torch.tensor(sample.loss_mask)
                torch.testing.assert_close(torch.tensor(sample.teacher_logprobs), masked, rtol=0, atol=1e-5)
        rank.update(scored)
    save(rank, tmp_path)
    make_rank(learner, AlgorithmConfig()).load(str(tmp_path))  # a checkpoint is the student's alone


def test_teacher_with_a_window_scores_what_samples_share(
    make_rank: MakeRank, untied_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(untied_model, tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": layers}
    (folder / "config.json").write_text(json.dumps(config))
    rank = make_rank(algorithm=AlgorithmConfig(name="distillation", options={"teacher": str(folder)}))
    teacher, own = load(folder), ragged_samples(4)
    batch = TrainBatch(samples=tuple(each.replaced(prompt_ids=tuple(range(200))) for each in own))
    for sample in rank.score([batch])[0].samples:
        expected = token_logprobs(teacher, sample.prompt_ids, sample.response_ids, 1.0)
        masked = expected * torch.tensor(sample.loss_mask)
        torch.testing.assert_close(torch.tensor(sample.teacher_logprobs), masked, rtol=0, atol=1e-5)


def test_distillation_brings_student_near_to_teacher(make_rank: MakeRank, untied_model: Path) -> None:
    options = {"teacher": str(untied_model)}
    rank = make_rank(algorithm=AlgorithmConfig(name="distillation", options=options))
    rank.begin_phase(FAST, 100)
    gaps = []
    for _ in range(4):
        (batch,) = rank.score(batches(1))
        rows = [
            tuple(
                teacher - own for teacher, own in zip(each.teacher_logprobs, each.old_logprobs, strict=True)
            )
            for each in batch.samples
        ]
        gaps.append(sum(sum(map(abs, row)) for row in rows))
        rank.update([batch.with_column("advantages", rows)])
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.95 * gaps[0]


# -- checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "learner", [LearnerConfig(), ADAPTED, QLORA], ids=["all weights", "adapters", "four bits"]
)
def test_loaded_checkpoint_goes_on_bit_by_bit(
    make_rank: MakeRank, tmp_path: Path, learner: LearnerConfig
) -> None:
    first = make_rank(learner, WITH_REFERENCE)
    first.begin_phase(FAST, 100)
    first.update(first.score(batches()))
    save(first, tmp_path)
    first.update(first.score(batches()))
    second = make_rank(learner, WITH_REFERENCE, seed=1)
    step(second)  # so that there is something to be overwritten
    second.begin_phase(FAST, 100)
    assert second.load(str(tmp_path)) is None
    second.update(second.score(batches()))
    assert_same(weights(second), weights(first))
    assert reference_logprobs(second) == reference_logprobs(first)


def test_resumed_learner_has_its_runs_settings_and_moments(make_rank: MakeRank, tmp_path: Path) -> None:
    first = make_rank()
    first.begin_phase(OptimizerConfig(lr=1e-3, warmup_steps=4), 100)
    first.update(first.score(batches()))
    save(first, tmp_path)
    second = make_rank(LearnerConfig(verl={"optimizer": {"betas": [0.5, 0.6]}}))
    second.begin_phase(OptimizerConfig(lr=1e-4, weight_decay=0.3, warmup_steps=4), 100)
    second.load(str(tmp_path))
    (group,) = second.engine.optimizer.param_groups
    assert (group["weight_decay"], tuple(group["betas"])) == (0.3, (0.5, 0.6))
    assert {int(each["step"]) for each in second.engine.optimizer.state_dict()["state"].values()} == {2}
    metrics = second.update(second.score(batches())).metrics
    assert metrics["learn/lr"] == pytest.approx(1e-4 * 2 / 4), "the second of the four steps of the warm-up"


def test_checkpoint_that_does_not_fit_the_settings_is_refused(make_rank: MakeRank, tmp_path: Path) -> None:
    plain = make_rank()
    with pytest.raises(ConfigError, match=r"is not the state of a learner, .* it has 0 files"):
        plain.load(str(tmp_path))
    save(plain, tmp_path)
    with pytest.raises(ConfigError, match=r"holds no reference policy with .* other settings"):
        make_rank(algorithm=WITH_REFERENCE).load(str(tmp_path))
    adapted = make_rank(ADAPTED)
    with pytest.raises(ConfigError, match=r"of rank 0 and alpha 0, .* learner.lora.rank=4 .*: resume with"):
        adapted.load(str(tmp_path))
    save(adapted, tmp_path)
    with pytest.raises(ConfigError, match=r"of rank 4 and alpha 16, .*rank=4 and alpha 8: resume with"):
        make_rank(LearnerConfig(lora=LoRAConfig(rank=4), verl={"model": {"lora_alpha": 8}})).load(
            str(tmp_path)
        )


def test_checkpoint_of_another_model_is_refused(
    make_rank: MakeRank, make_critic_rank: MakeRank, untied_model: Path, tmp_path: Path
) -> None:
    save(make_critic_rank(), tmp_path / "critic")
    with pytest.raises(ConfigError, match=r"another model: only one of the two has '\w.*' of shape"):
        make_rank().load(str(tmp_path / "critic"))
    save(make_rank(), tmp_path / "tied")
    untied = make_rank(model=untied_model)
    with pytest.raises(ConfigError, match=r"another model: only one .* 'lm_head.* Resume with the mod"):
        untied.load(str(tmp_path / "tied"))


# -- adapters ------------------------------------------------------------------------------------------


def test_adapters_are_merged_into_what_is_published_and_saved(
    make_rank: MakeRank, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    rank = make_rank(ADAPTED)
    assert_same(weights(rank), weights_of(tiny_model))
    step(rank, OptimizerConfig(lr=1e-2))
    save(rank, tmp_path)
    assert_same(weights(rank), weights_of(tmp_path / "huggingface"))
    merged = load(tmp_path / "huggingface")
    adapted = PeftModel.from_pretrained(load(tiny_model), tmp_path / "adapter")
    base = load(tiny_model)
    for sample in with_old_logprobs(rank, batches(1)[0]).samples[:2]:
        mask = torch.tensor(sample.loss_mask)
        ours = torch.tensor(sample.old_logprobs)
        with torch.no_grad():
            theirs, apart, before = (
                token_logprobs(model, sample.prompt_ids, sample.response_ids, 1.0) * mask
                for model in (merged, adapted, base)
            )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours, apart, rtol=0, atol=1e-4)
        assert (ours - before).abs().max() > 0.05


def test_adapters_learn_on_a_base_in_four_bits(make_rank: MakeRank, tiny_model: Path, tmp_path: Path) -> None:
    """What is published is what the learner computes with, in the dtype of the model."""
    rank, whole = make_rank(QLORA), make_rank(ADAPTED)
    base = {name: each for name, each in rank.engine.module.named_parameters() if ".base_layer." in name}
    kept = {name: each.detach().clone() for name, each in base.items()}
    assert len(base) == 28 and {each.dtype for each in base.values()} == {torch.uint8, torch.bfloat16}
    layers = [each for name, each in weights_of(tiny_model).items() if "_proj." in name]
    assert 8 * sum(each.nbytes for each in base.values()) == 4.25 * sum(each.numel() for each in layers)
    gains = []
    for each in (rank, whole):
        each.begin_phase(OptimizerConfig(lr=1e-2), 100)
        losses = [each.fit(batches()).metrics["learn/loss"] for _ in range(2)]
        gains.append(losses[0] - losses[1])
    assert gains[1] > 0 and gains[0] == pytest.approx(gains[1], rel=0.1)
    trained = [name for name, each in rank.engine.module.named_parameters() if each.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert_same({name: each.detach() for name, each in base.items()}, kept)
    save(rank, tmp_path)
    assert_same(weights(rank), weights_of(tmp_path / "huggingface"))
    assert {each.dtype for _, each in rank.weights()} == {torch.float32}
    merged = load(tmp_path / "huggingface")
    for sample in with_old_logprobs(rank, batches(1)[0]).samples[:2]:
        with torch.no_grad():
            theirs = token_logprobs(merged, sample.prompt_ids, sample.response_ids, 1.0)
        theirs *= torch.tensor(sample.loss_mask)
        torch.testing.assert_close(torch.tensor(sample.old_logprobs), theirs, rtol=0, atol=1e-4)
    with pytest.raises(
        ConfigError, match=r"another model: .*base_layer.* the learner.verl.model that it was"
    ):
        whole.load(str(tmp_path))


def test_base_in_four_bits_is_that_of_float32_in_bfloat16(make_rank: MakeRank) -> None:
    batch, dtypes = batches(1)[0], ("float32", "bfloat16")
    exact, rounded = (make_rank(replace(QLORA, dtype=dtype)).logprobs(batch) for dtype in dtypes)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours == pytest.approx(theirs, abs=0.1)


@pytest.mark.parametrize("layers", [".*embed_tokens", "lm_head"])
def test_adapter_that_cannot_be_merged_is_refused(make_rank: MakeRank, layers: str) -> None:
    with pytest.raises(
        ConfigError, match=r"learner.verl.model.target_modules puts an adapter on .*cannot be merged"
    ):
        make_rank(LearnerConfig(lora=LoRAConfig(rank=4), verl={"model": {"target_modules": layers}}))


@pytest.fixture(scope="module")
def experts_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``experts_model(name)``: a random mixture of four experts, with a tokenizer."""

    def build(name: str, **settings: Any) -> Path:
        import transformers

        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
        config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), **sizes, **settings)
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return build


@pytest.mark.parametrize(
    ("name", "settings", "num_weights"),
    [
        ("Qwen3Moe", {"head_dim": 8}, 45),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 16}, 55),
    ],
)
def test_adapters_beside_experts_go_by_the_checkpoints_names(
    make_rank: MakeRank,
    experts_model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    settings: dict[str, int],
    num_weights: int,
) -> None:
    """all-linear means the linear layers; transformers keeps the experts as one tensor."""
    path = experts_model(name, **settings)
    rank = make_rank(ADAPTED, model=path)
    assert len(weights(rank)) == num_weights
    assert_same(weights(rank), _on_disk(path))
    before = weights(rank)
    step(rank, OptimizerConfig(lr=1e-2))
    save(rank, tmp_path)
    assert_same(weights(rank), _on_disk(tmp_path / "huggingface"))
    moved = {
        key.split(".")[-2] for key, tensor in weights(rank).items() if not torch.equal(tensor, before[key])
    }
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= moved
    assert not moved & {"gate_proj", "up_proj", "down_proj", "gate", "lm_head", "embed_tokens"}
    merged = load(tmp_path / "huggingface")
    sample = with_old_logprobs(rank, batches(1)[0]).samples[0]
    with torch.no_grad():
        theirs = token_logprobs(merged, sample.prompt_ids, sample.response_ids, 1.0)
    torch.testing.assert_close(
        torch.tensor(sample.old_logprobs), theirs * torch.tensor(sample.loss_mask), rtol=0, atol=1e-4
    )


def _on_disk(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_adapters_on_experts_are_refused_with_a_remedy(
    make_rank: MakeRank, experts_model: Callable[..., Path]
) -> None:
    experts = {"model": {"target_modules": r".*\.experts\..*_proj"}}
    with pytest.raises(ConfigError, match=r"experts', which cannot be merged .* nor experts, or all-linear"):
        make_rank(
            LearnerConfig(lora=LoRAConfig(rank=4), verl=experts), model=experts_model("Qwen3Moe", head_dim=8)
        )


def test_adapters_on_no_layer_are_refused(make_rank: MakeRank) -> None:
    with pytest.raises(ConfigError, match=r"learner.verl.model.target_modules='no_such_layer': .*not found"):
        make_rank(LearnerConfig(lora=LoRAConfig(rank=4), verl={"model": {"target_modules": "no_such_layer"}}))


# -- the critic ----------------------------------------------------------------------------------------


def valued(critic: Any) -> list[TrainBatch]:
    """Batches whose return is 1 at every token of every other sample, and 0 in between."""
    result = []
    for batch, rows in zip(batches(), critic.values(batches()), strict=True):
        samples = [
            replace(sample, values=row, returns=tuple(float(index % 2 and bit) for bit in sample.loss_mask))
            for index, (sample, row) in enumerate(zip(batch.samples, rows, strict=True))
        ]
        result.append(TrainBatch(samples=tuple(samples)))
    return result


def test_critic_begins_at_zero_and_learns_what_states_are_worth(make_critic_rank: MakeRank) -> None:
    critic = make_critic_rank()
    critic.begin_phase(OptimizerConfig(lr=5e-3), 100)
    first = valued(critic)
    assert {value for batch in first for sample in batch.samples for value in sample.values} == {0.0}
    reported = [critic.update(first[:1]), *(critic.update(valued(critic)) for _ in range(8))]
    returns = torch.cat([torch.tensor(sample.returns) for sample in first[0].samples])
    count = sum(sample.num_sampled_tokens for sample in first[0].samples)
    assert reported[0]["learn/value_loss"] == pytest.approx((returns**2).sum().item() / count / 2)
    assert explained_variance(first[0].samples)["learn/explained_variance"] == pytest.approx(0)
    assert reported[-1]["learn/value_loss"] < 0.5 * reported[0]["learn/value_loss"]
    last = [sample for batch in valued(critic) for sample in batch.samples]
    assert explained_variance(last)["learn/explained_variance"] > 0.3
    assert {"learn/value_grad_norm", "learn/value_clip_fraction", "learn/value_lr"} <= set(reported[0])


def test_critic_of_model_with_rate_of_dropout_begins_at_zero_too(
    make_critic_rank: MakeRank, tiny_model: Path, tmp_path: Path
) -> None:
    """verl sets such a rate, which StableLM has, to the text "0"."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    config = transformers.StableLmConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    transformers.StableLmForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    critic = make_critic_rank(model=tmp_path)
    assert {value for row in critic.values(batches(1))[0] for value in row} == {0.0}


def test_critic_takes_as_many_steps_as_the_policy(make_critic_rank: MakeRank) -> None:
    critic, by_hand = make_critic_rank(), make_critic_rank()
    for each in (critic, by_hand):
        each.begin_phase(FAST, 100)
    first, second = valued(critic)
    reported = critic.update([first, second, second, first])
    assert reported["learn/value_lr"] == FAST.lr
    for batch in (first, second, second, first):
        by_hand.update([batch])
    assert_same(weights(critic), weights(by_hand))


def test_critics_checkpoint_restores_its_values(make_critic_rank: MakeRank, tmp_path: Path) -> None:
    critic, other = make_critic_rank(), make_critic_rank(seed=1)
    critic.begin_phase(FAST, 100)
    critic.update(valued(critic))
    critic.update(valued(critic))
    save(critic, tmp_path)
    assert other.values(batches()) != critic.values(batches())
    assert other.load(str(tmp_path)) is None
    assert other.values(batches()) == critic.values(batches())
