"""Learners of model families that differ from the tiny Qwen3: windows, latent attention, experts, pictures.

``tests/benchmarks/families.py`` takes all families through the engine too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from learner_samples import ragged_samples, save
from model_families import FAMILIES, build
from transformers_reference import load, token_logprobs, weights_of

from policies.chat import load_tokenizer
from policies.learning.samples import TrainBatch
from policies.learning.settings import LearnerConfig, LoRAConfig

if TYPE_CHECKING:
    from learner_samples import MakeRank

LEARNERS = {"all weights": LearnerConfig(), "adapters": LearnerConfig(lora=LoRAConfig(rank=4))}


@pytest.mark.slow
@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("name", ["Gemma 3", "Qwen3-MoE", "DeepSeek V3", "Qwen2.5-VL", "SmolVLM"])
def test_family_scores_as_transformers_which_knows_its_names(
    make_rank: MakeRank, tiny_model: Path, tmp_path: Path, name: str, learner: str
) -> None:
    family = replace(FAMILIES[name], template=None)
    path = build(family, family.tied[0], load_tokenizer(tiny_model), tmp_path / "model")
    rank = make_rank(LEARNERS[learner], model=path)
    batch = TrainBatch(samples=ragged_samples(3))
    update = rank.update(rank.score([batch]))
    assert update.metrics["learn/grad_norm"] > 0
    save(rank, tmp_path)
    assert len(weights_of(tmp_path / "huggingface")) == len(weights_of(path))
    model, before = load(tmp_path / "huggingface"), load(path).state_dict()
    moved = {key for key, each in model.state_dict().items() if not torch.equal(each, before[key])}
    routers = {key for key in before if ".mlp.gate." in key}
    assert moved and not moved & routers, "the router of experts stays as it is"
    if learner == "all weights" and routers:
        assert any(".experts." in key for key in moved)
    _, found = type(model).from_pretrained(tmp_path / "huggingface", output_loading_info=True)
    assert not any(found.values()), "transformers knows all names, and has a weight for each of its own"
    for sample, row in zip(batch.samples, rank.logprobs(batch), strict=True):
        with torch.no_grad():
            expected = token_logprobs(model, sample.prompt_ids, sample.response_ids, 1.0)
        torch.testing.assert_close(
            torch.tensor(row), expected * torch.tensor(sample.loss_mask), rtol=0, atol=1e-4
        )
