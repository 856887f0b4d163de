"""The learner as worker groups: two ranks do what one does, and any number can load what they save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learner_samples import RESPONSE_TOKENS, batches, ragged_samples, save
from transformers_reference import load, token_logprobs, weights_of

from environments.errors import ConfigError
from policies.chat import load_tokenizer
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, padding_sample
from policies.learning.served_teacher import ServedTeacher
from policies.learning.settings import (
    AlgorithmConfig,
    KLConfig,
    LearnerConfig,
    LoRAConfig,
    OptimizerConfig,
)
from policies.model_files import num_rows

if TYPE_CHECKING:
    from learner_samples import MakeLearner, MakeRank
    from served_policy import ServedPolicy

FROZEN = OptimizerConfig(lr=0.0)
TWO_RANKS = LearnerConfig(num_workers=2, micro_batch_tokens=200)
"""Micro-batches so small that a rank needs several: they must not change anything either."""


def test_groups_with_padding_score_and_learn_as_one_rank_does(
    make_learner: MakeLearner, make_rank: MakeRank, tiny_model: Path
) -> None:
    """Two groups of two ranks, which compute each row together. That one rank's gradient is the formula's is
    tested with the learner itself."""
    samples, model = ragged_samples(), load(tiny_model)
    alone = make_rank(LearnerConfig(optimizer=FROZEN))
    expected = alone.update(alone.score([TrainBatch(samples=samples)])).metrics
    groups = {"engine": {"ulysses_sequence_parallel_size": 2}}
    learner = make_learner(LearnerConfig(num_workers=4, micro_batch_tokens=100, verl=groups))
    learner.begin_phase(FROZEN, 100)
    found = learner.logprobs(TrainBatch(samples=samples))
    for row, sample in zip(found, samples, strict=True):  # in their order, without padding
        with torch.no_grad():
            of_tokens = token_logprobs(model, sample.prompt_ids, sample.response_ids, 1.0)
        of_tokens *= torch.tensor(sample.loss_mask)  # a token that is not learned from has 0
        torch.testing.assert_close(torch.tensor(row), of_tokens, rtol=0, atol=1e-4)
    for rows in (0, 1, 3):  # 7 rows over 2 groups: with 0 and with 3 there is a row more to be added
        batch = TrainBatch(samples=samples + (padding_sample(1),) * rows)
        metrics = learner.update(learner.score([batch])).metrics
        assert metrics["learn/ratio_mean"] == metrics["learn/ratio_max"] == 1
        for name in ("learn/grad_norm", "learn/loss", "learn/entropy", "learn/rollout_logprob_diff_mean"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


def test_two_ranks_load_what_one_has_saved(
    make_learner: MakeLearner, make_rank: MakeRank, tmp_path: Path
) -> None:
    alone, learner = make_rank(), make_learner(TWO_RANKS)
    alone.begin_phase(OptimizerConfig(lr=1e-3), 100)
    alone.update(alone.score(batches(1)))
    save(alone, tmp_path)
    left_out = learner.load(str(tmp_path))
    assert left_out is not None
    assert "written by 1 learner rank(s) and is loaded by 2" in left_out
    again = str(tmp_path / "again")
    learner.begin_save(again)()
    saved = weights_of(Path(again) / "huggingface")
    for name, tensor in alone.weights():
        assert torch.equal(saved[name], tensor), name


def test_rank_whose_disk_is_another_is_refused(tmp_path: Path) -> None:
    from actors.learning.ranks import check_shared

    shared = tmp_path / ".lock"
    shared.write_text("this run")
    check_shared(str(shared), "this run")
    for path, text in ((shared, "another run"), (tmp_path / "elsewhere" / ".lock", "this run")):
        with pytest.raises(ConfigError, match=r"is another folder on .* disk that all nodes share"):
            check_shared(str(path), text)


def test_model_that_cannot_be_loaded_is_explained_in_a_sentence(weight_store: Any, tiny_model: Path) -> None:
    from actors.learning.learner_group import LearnerGroup

    learner = LearnerConfig(lora=LoRAConfig(rank=4), verl={"model": {"target_modules": "no_such_layer"}})
    group = LearnerGroup(str(tiny_model), learner, resolve(AlgorithmConfig(), 64), 100, 0, weight_store)
    with pytest.raises(ConfigError, match=r"learner.verl.model.target_modules='no_such_layer': .*not found"):
        group.begin_phase(FROZEN, 100)
    group.close()


PPO = AlgorithmConfig(name="ppo", kl=KLConfig(place="reward", coef=0.1, estimator="k1"))
ADAPTED = replace(TWO_RANKS, lora=LoRAConfig(rank=4), optimizer=OptimizerConfig(lr=1e-2))


def with_returns(scored: Sequence[TrainBatch]) -> list[TrainBatch]:
    return [
        replace(
            batch,
            samples=tuple(
                replace(sample, returns=tuple(float(index % 2 and bit) for bit in sample.loss_mask))
                for index, sample in enumerate(batch.samples)
            ),
        )
        for batch in scored
    ]


def assert_scored_alike(some: Sequence[TrainBatch], others: Sequence[TrainBatch]) -> None:
    for one, other in zip(some, others, strict=True):
        for ours, theirs in zip(one.samples, other.samples, strict=True):
            assert ours.old_logprobs == pytest.approx(theirs.old_logprobs, abs=1e-5)
            assert ours.reference_logprobs == pytest.approx(theirs.reference_logprobs, abs=1e-5)
            assert ours.old_logprobs != pytest.approx(ours.reference_logprobs, abs=1e-2)


def test_adapters_critic_reference_of_two_ranks_load_on_one(
    make_learner: MakeLearner, make_rank: MakeRank, make_critic_rank: MakeRank, tmp_path: Path
) -> None:
    learner = make_learner(ADAPTED, PPO)
    learner.begin_phase(ADAPTED.optimizer, 100)
    first = learner.score(batches(1))
    assert {value for sample in first[0].samples for value in sample.values} == {0.0}
    assert [each.old_logprobs for each in first[0].samples] == [
        each.reference_logprobs for each in first[0].samples
    ]
    for _ in range(2):
        update = learner.update(with_returns(learner.score(batches(1))))
    assert update.num_optimizer_steps == 1
    assert update.metrics["learn/value_loss"] > 0
    assert update.metrics["learn/ratio_max"] == 1
    trained = learner.score(batches(1))
    learner.begin_save(str(tmp_path))()

    alone = make_rank(replace(ADAPTED, num_workers=1), PPO, seed=1)
    left_out = alone.load(str(tmp_path))
    assert "written by 2 learner rank(s) and is loaded by 1" in left_out
    assert_scored_alike(trained, alone.score(batches(1)))
    saved = weights_of(tmp_path / "huggingface")
    for name, tensor in alone.weights():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-6)
    critic = make_critic_rank(seed=1)
    assert critic.load(str(tmp_path / "critic")) is not None
    for row, sample in zip(critic.values(batches(1))[0], trained[0].samples, strict=True):
        assert row == pytest.approx(sample.values, abs=1e-5)
        assert any(row)

    learner.update(with_returns(trained))
    assert learner.load(str(tmp_path)) is None
    assert learner.score(batches(1)) == trained


def test_policy_server_is_the_teacher_of_a_learner(
    make_learner: MakeLearner, policy_app: ServedPolicy, tiny_model: Path
) -> None:
    """The student begins as its teacher, and goes away from it by an update."""
    options = {"teacher": policy_app.base_url, "teacher_model": "policy"}
    algorithm = AlgorithmConfig(name="distillation", options=options)
    served = ServedTeacher.of(resolve(algorithm, RESPONSE_TOKENS))
    assert served is not None
    tokenizer, rows = load_tokenizer(str(tiny_model)), num_rows(str(tiny_model))
    assert rows is not None
    served.check(lambda number: tokenizer.decode([number]), rows, 200)
    with pytest.raises(ConfigError, match=r"has token .* as .*, and the student has it as 'other'"):
        served.check(lambda number: "other", rows, 200)
    with pytest.raises(ConfigError, match=r"cannot teach.*100000 given tokens, the longest rollout"):
        served.check(lambda number: tokenizer.decode([number]), rows, 100_000)
    learner, teacher = make_learner(LearnerConfig(), algorithm), load(tiny_model)
    learner.begin_phase(OptimizerConfig(lr=1e-2), 100)
    for num_updates in range(2):
        (batch,) = learner.score([TrainBatch(samples=ragged_samples())])
        for sample in batch.samples:
            with torch.no_grad():
                expected = token_logprobs(teacher, sample.prompt_ids, sample.response_ids, 1.0)
            expected *= torch.tensor(sample.loss_mask)
            torch.testing.assert_close(torch.tensor(sample.teacher_logprobs), expected, rtol=0, atol=1e-4)
            moved = (torch.tensor(sample.old_logprobs) - expected).abs().max()
            assert (moved > 1e-2) == bool(num_updates), moved
        learner.update([batch])
