"""The gradient of a step on preferences is that of DPO's formula, however the batch is cut and spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learner_samples import RESPONSE_TOKENS, ragged_samples
from machine import free_port
from transformers_reference import load, perturbed, token_logprobs, weights_of
from two_ranks import on_two_ranks
from whole_batches import WholeBatches

from policies.learning.algorithms import resolve
from policies.learning.preferences import Pair, PairScore, PreferenceObjective, batch_of, pair_scores
from policies.learning.samples import TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

FROZEN = OptimizerConfig(lr=0.0, max_grad_norm=1e9)
"""So that the gradient can be read after the step."""
OBJECTIVE = PreferenceObjective(beta=0.3, sft_coef=0.2)


def pairs() -> list[Pair]:
    """Three pairs: in one a side has a rewritten history, in one the sides have prompts of their own."""
    samples = [sample.replaced(advantages=()) for sample in ragged_samples(7)]
    prompts = [samples[0], samples[0], samples[2], samples[2], samples[4], samples[5], samples[6]]
    given = [
        sample.replaced(prompt_ids=prompt.prompt_ids) for sample, prompt in zip(samples, prompts, strict=True)
    ]
    return [
        Pair(chosen=(given[0],), rejected=(given[1],)),
        Pair(chosen=(given[2],), rejected=(given[3], given[6])),
        Pair(chosen=(given[4],), rejected=(given[5],)),
    ]


def log_likelihood(model: Any, side: Sequence[TrainingSample]) -> torch.Tensor:
    return sum(
        (token_logprobs(model, each.prompt_ids, each.response_ids, 1.0) * torch.tensor(each.loss_mask)).sum()
        for each in side
    )


def expected(model_path: Path, objective: PreferenceObjective) -> tuple[Any, list[PairScore], float]:
    """The gradient by name, the scores of a reference that is another policy, and the loss, of the papers."""
    model = load(model_path)
    reference = load(model_path, perturbed(weights_of(model_path), seed=1))
    losses, scores = [], []
    for pair in pairs():
        with torch.no_grad():
            chosen, rejected = (log_likelihood(reference, side) for side in (pair.chosen, pair.rejected))
        scores.append(PairScore(chosen=float(chosen), rejected=float(rejected)))
        likelihood = log_likelihood(model, pair.chosen)
        margin = (likelihood - chosen) - (log_likelihood(model, pair.rejected) - rejected)
        num_tokens = sum(sum(sample.loss_mask) for sample in pair.chosen)
        losses.append(
            -torch.nn.functional.logsigmoid(objective.beta * margin)
            - objective.sft_coef * likelihood / num_tokens
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradient, scores, float(loss.detach())


def gradient_of_a_step(
    rank: Any, reference: list[PairScore], objective: PreferenceObjective
) -> tuple[dict[str, torch.Tensor], float]:
    """One step of the stage, by the learner's two calls: its gradient and its loss."""
    from policies.learning.verl.weights import full_tensor

    rank.begin_phase(FROZEN, 10)
    found: dict[str, torch.Tensor] = {}

    def read(*_: Any) -> None:
        named = rank.engine.module.named_parameters()
        found.update({name: full_tensor(each.grad).clone() for name, each in named})

    rank.engine.optimizer.register_step_pre_hook(read)
    rows = [rank.logprobs(batch_of(pairs()))]
    torch.distributed.broadcast_object_list(rows)  # a driver hands all ranks the same
    policy = pair_scores(pairs(), rows[0])
    rank.fit_weighted(objective.weighted(pairs(), policy, reference))
    return found, objective.metrics(pairs(), policy, reference)["loss"]


def assert_is_dpo(rank: Any, model: Path, objective: PreferenceObjective) -> None:
    theirs, reference, loss = expected(model, objective)
    ours, own_loss = gradient_of_a_step(rank, reference, objective)
    assert own_loss == pytest.approx(loss, abs=1e-5)
    assert set(ours) == set(theirs)
    assert max(float(each.abs().max()) for each in theirs.values()) > 0.1, "there is something to compare"
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    print(f"largest difference of the gradients: {difference:.2g}")
    assert difference < 1e-5


@pytest.mark.parametrize("micro_batch_tokens", [16384, 130], ids=["one pass", "cut"])
@pytest.mark.parametrize("sft_coef", [0.0, 0.2])
def test_gradient_of_a_step_is_that_of_dpo(
    make_rank: MakeRank, tiny_model: Path, micro_batch_tokens: int, sft_coef: float
) -> None:
    rank = make_rank(LearnerConfig(micro_batch_tokens=micro_batch_tokens))
    assert_is_dpo(rank, tiny_model, PreferenceObjective(beta=0.3, sft_coef=sft_coef))


def two_ranks_learn(model: Path) -> None:
    """Take the same step on two ranks, neither of which has both sides of all pairs."""
    from policies.learning.verl.learner import VerlLearner

    algorithm = resolve(AlgorithmConfig(), RESPONSE_TOKENS)
    rank = WholeBatches(VerlLearner(str(model), LearnerConfig(micro_batch_tokens=130), algorithm, 10, 0))
    _, [shard] = rank._divided([batch_of(pairs())])
    own = {branch.sample for row in shard.rows for branch in row}
    assert any(own & of_pair and of_pair - own for of_pair in ({0, 1}, {2, 3, 4}, {5, 6}))
    assert_is_dpo(rank, model, OBJECTIVE)


def test_sides_of_a_pair_need_not_be_on_one_rank(tiny_model: Path) -> None:
    on_two_ranks(two_ranks_learn, free_port(), tiny_model)
