"""Ten updates on recorded rollouts, beside a learner that is written from the papers: the same weights.

The policy starts up to 8 nats away from its reference, and where the recorded log-probabilities are the old
ones the ratio is up to e^8: all clips are reached.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import oracle
import pytest
import torch
from learner_samples import num_rows
from oracle import Oracle, Rules
from transformers_reference import perturbed, weights_of

from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from policies.learning.credit import assign_credit
from policies.learning.samples import TrainBatch, TrainingSample, training_samples
from policies.learning.settings import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    LearnerConfig,
    OptimizerConfig,
)

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

NUM_UPDATES = 10
TOLERANCE = 1e-5
"""Our weights are in float32, the oracle's in float64."""
MICRO_BATCH_TOKENS = 40
"""A mini-batch has 64 in the median, a sequence 35 at most."""

SCALE = 0.1
"""Standard deviation of what is added to the weights of the reference."""
WIDE_CLIP = (0.3, 0.4)
"""A random ratio would never lie in that of GSPO's paper."""
BYPASS = CorrectionConfig(level="bypass")


def kl(place: str, estimator: str, coef: float) -> KLConfig:
    return KLConfig(place=place, estimator=estimator, coef=coef)


CASES: dict[str, tuple[AlgorithmConfig, Rules]] = {
    "grpo, k3 in the loss": (
        AlgorithmConfig(name="grpo", kl=kl("loss", "k3", 1e-3)),
        Rules(
            advantage=oracle.grpo_advantage,
            loss=oracle.ppo_loss,
            kl_place="loss",
            kl=oracle.k3,
            kl_coef=1e-3,
        ),
    ),
    "grpo, recorded, k2 in the reward": (
        AlgorithmConfig(name="grpo", kl=kl("reward", "k2", 0.1), correction=BYPASS),
        Rules(
            advantage=oracle.grpo_advantage,
            loss=oracle.ppo_loss,
            kl_place="reward",
            kl=oracle.k2,
            kl_coef=0.1,
            recorded_is_old=True,
        ),
    ),
    "grpo, tokens weighted": (
        AlgorithmConfig(name="grpo", correction=CorrectionConfig(level="token")),
        Rules(advantage=oracle.grpo_advantage, loss=oracle.ppo_loss, weight=oracle.truncated_weight),
    ),
    "grpo, sequences weighted, two epochs": (
        AlgorithmConfig(name="grpo", correction=CorrectionConfig(level="sequence")),
        Rules(
            advantage=oracle.grpo_advantage,
            loss=oracle.ppo_loss,
            weight=oracle.truncated_weight_of_the_sequence,
            num_epochs=2,
        ),
    ),
    "dr_grpo, k2 in the loss, entropy": (
        AlgorithmConfig(name="dr_grpo", kl=kl("loss", "k2", 0.1), entropy_coef=0.01),
        Rules(
            advantage=oracle.dr_grpo_advantage,
            loss=oracle.ppo_loss,
            aggregate=oracle.mean_of_sums_over_the_limit,
            kl_place="loss",
            kl=oracle.k2,
            kl_coef=0.1,
            entropy_coef=0.01,
        ),
    ),
    "grpo, two epochs, k2 in the loss": (
        AlgorithmConfig(name="grpo", kl=kl("loss", "k2", 0.1)),
        Rules(
            advantage=oracle.grpo_advantage,
            loss=oracle.ppo_loss,
            kl_place="loss",
            kl=oracle.k2,
            kl_coef=0.1,
            num_epochs=2,
        ),
    ),
    "gspo, recorded, k1+ in the loss": (
        AlgorithmConfig(
            name="gspo",
            kl=kl("loss", "k1+", 0.1),
            correction=BYPASS,
            clip_low=WIDE_CLIP[0],
            clip_high=WIDE_CLIP[1],
        ),
        Rules(
            advantage=oracle.grpo_advantage,
            loss=oracle.gspo_loss,
            clip=WIDE_CLIP,
            aggregate=oracle.mean_of_means,
            kl_place="loss",
            kl=oracle.k2,
            kl_coef=0.1,
            recorded_is_old=True,
        ),
    ),
    "cispo, recorded, small gradients": (
        AlgorithmConfig(name="cispo", correction=BYPASS),
        Rules(
            advantage=oracle.grpo_advantage,
            loss=oracle.cispo_loss,
            clip=(1.0, 0.2),
            recorded_is_old=True,
            max_grad_norm=0.5,
        ),
    ),
    "rloo, k3 in the reward": (
        AlgorithmConfig(name="rloo", kl=kl("reward", "k3", 1e-3)),
        Rules(
            advantage=oracle.rloo_advantage,
            loss=oracle.reinforce_loss,
            aggregate=oracle.mean_of_sums,
            kl_place="reward",
            kl=oracle.k3,
            kl_coef=1e-3,
        ),
    ),
    "ppo, k1 in the reward": (
        AlgorithmConfig(name="ppo", kl=kl("reward", "k1", 0.1)),
        Rules(
            advantage=oracle.gae_advantage,
            loss=oracle.ppo_loss,
            kl_place="reward",
            kl=oracle.k1,
            kl_coef=0.1,
            critic=True,
        ),
    ),
    "ppo, three epochs": (
        AlgorithmConfig(name="ppo"),
        Rules(advantage=oracle.gae_advantage, loss=oracle.ppo_loss, critic=True, num_epochs=3),
    ),
    "ppo, recorded, k3 in the loss": (
        AlgorithmConfig(name="ppo", kl=kl("loss", "k3", 1e-3), correction=BYPASS),
        Rules(
            advantage=oracle.gae_advantage,
            loss=oracle.ppo_loss,
            kl_place="loss",
            kl=oracle.k3,
            kl_coef=1e-3,
            critic=True,
            recorded_is_old=True,
        ),
    ),
}


def k3_that_stops_at_10(gap: torch.Tensor) -> torch.Tensor:
    """verl's."""
    return oracle.k3(gap).clamp(max=10)


def without_dual_clip(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: oracle.Clip
) -> torch.Tensor:
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, oracle.clipped(ratio, clip) * advantage)


def with_gradient_through_the_clip(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: oracle.Clip
) -> torch.Tensor:
    return -oracle.clipped((new - old).exp(), clip) * advantage * new


def by_the_populations_deviation(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "k3 stops at 10": ("grpo, k3 in the loss", {"kl": k3_that_stops_at_10}),
    "k3 stops at 10 in the reward": ("rloo, k3 in the reward", {"kl": k3_that_stops_at_10}),
    "the population's deviation": (
        "grpo, k3 in the loss",
        {"advantage": oracle.group_relative(by_the_populations_deviation)},
    ),
    "no dual clip": ("grpo, recorded, k2 in the reward", {"loss": without_dual_clip}),
    "a mean over tokens": ("dr_grpo, k2 in the loss, entropy", {"aggregate": oracle.mean_of_means}),
    "a ratio for each token": ("gspo, recorded, k1+ in the loss", {"loss": without_dual_clip}),
    "a gradient through the clip": (
        "cispo, recorded, small gradients",
        {"loss": with_gradient_through_the_clip},
    ),
    "a baseline with the member itself": (
        "rloo, k3 in the reward",
        {"advantage": oracle.dr_grpo_advantage},
    ),
    "another lambda": ("ppo, k1 in the reward", {"advantage": partial(oracle.gae_advantage, lam=0.9)}),
    "no weights": ("grpo, tokens weighted", {"weight": torch.ones_like}),
    "weights of sequences": (
        "grpo, tokens weighted",
        {"weight": oracle.truncated_weight_of_the_sequence},
    ),
    "weights of tokens": ("grpo, sequences weighted, two epochs", {"weight": oracle.truncated_weight}),
    "weights that are not cut": ("grpo, tokens weighted", {"weight": torch.exp}),
    "a single epoch": ("grpo, two epochs, k2 in the loss", {"num_epochs": 1}),
    "a ratio of 1 in all epochs": ("grpo, two epochs, k2 in the loss", {"loss": oracle.reinforce_loss}),
    "a single epoch of the critic": ("ppo, three epochs", {"num_epochs": 1}),
    "a warm-up that is one step longer": ("cispo, recorded, small gradients", {"warmup_steps": 4}),
    "another temperature": ("cispo, recorded, small gradients", {"temperature": 1.0}),
}
"""What the comparison has to notice: a case, and what is wrong in it."""


# -- what was recorded ---------------------------------------------------------------------------------


def recorded(update: int, strips: bool = False) -> list[TrajectoryGroup]:
    """Two groups of three rollouts with one to three turns each; every third rollout rewrites its history.

    Args:
        strips: all have three turns, and the first half of what was sampled is taken out of the history, as
            thoughts are: a tree with as many branches as turns.
    """
    rng = random.Random(update)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(300) for _ in range(rng.randint(least, most)))

    def rollout(rollout_id: str, prompt: tuple[int, ...], rewrites: bool) -> Trajectory:
        trajectory, history = Trajectory(rollout_id=rollout_id), prompt
        for _ in range(3 if strips else rng.randint(1, 3)):
            sampled = tokens(3, 8)
            completion = Completion(
                prompt_ids=history,
                completion_ids=sampled,
                logprobs=tuple(rng.uniform(-14.0, -0.1) for _ in sampled),
                text="",
                finish_reason="stop",
            )
            trajectory.steps.append(Step(completion=completion, reward=rng.choice([0.0, 0.25, 1.0])))
            said = tokens(1, 4)
            if strips:
                history = (*history, *sampled[len(sampled) // 2 :], *said)
            else:
                history = (*prompt, *said) if rewrites else (*history, *sampled, *said)
        trajectory.reward = sum(step.reward for step in trajectory.steps)
        return trajectory

    groups = []
    for name in ("a", "b"):
        prompt = tokens(4, 10)
        members = tuple(rollout(f"{name}/{index}", prompt, rewrites=index % 3 == 2) for index in range(3))
        groups.append(TrajectoryGroup(group_id=name, task={}, trajectories=members))
    return groups


def mini_batches(groups: Sequence[TrajectoryGroup], update: int) -> list[list[str]]:
    """The rollouts of each of two optimizer steps."""
    ids = [each.rollout_id for group in groups for each in group.trajectories]
    random.Random(update).shuffle(ids)
    return [ids[::2], ids[1::2]]


# -- our own path --------------------------------------------------------------------------------------


class Ours:
    """The learner as the training loop uses it, on one rank in this process."""

    def __init__(self, rank: Any, critic: Any, start: dict[str, torch.Tensor], rules: Rules) -> None:
        from policies.learning.verl.weights import local, trainable

        self.policy, self._critic = rank, critic
        self._algorithm = rank._algorithm
        self._temperature, self._num_epochs = rules.temperature, rules.num_epochs
        rank.begin_phase(optimizer(rules), NUM_UPDATES)
        if critic is not None:
            critic.begin_phase(optimizer(rules), NUM_UPDATES)
        with torch.no_grad():  # the reference stays where it is
            for name, parameter in trainable(rank.engine.module).items():
                local(parameter).copy_(start[name])

    def update(self, groups: Sequence[TrajectoryGroup], steps: Sequence[Sequence[str]]) -> None:
        rollouts = {each.rollout_id: each for group in groups for each in group.trajectories}
        batches = [
            TrainBatch(
                samples=tuple(
                    sample for rollout_id in step for sample in training_samples(rollouts[rollout_id])
                ),
                temperature=self._temperature,
            )
            for step in steps
        ]
        scored = self.policy.score(batches)
        if self._critic is not None:
            scored = [
                replace(
                    batch,
                    samples=tuple(replace(s, values=v) for s, v in zip(batch.samples, rows, strict=True)),
                )
                for batch, rows in zip(scored, self._critic.values(scored), strict=True)
            ]
        samples: dict[str, list[TrainingSample]] = {}
        for sample in (sample for batch in scored for sample in batch.samples):
            samples.setdefault(sample.rollout_id, []).append(sample)
        credited, _ = assign_credit(groups, samples, self._algorithm, self._algorithm.kl_coef)
        by_id = {sample.sample_id: sample for each in credited.values() for sample in each}
        batches = [
            replace(batch, samples=tuple(by_id[sample.sample_id] for sample in batch.samples))
            for batch in batches
        ]
        taken = oracle.passes(batches, self._num_epochs)
        if self._critic is not None:
            self._critic.update(taken)
        self.policy.update(taken)


def optimizer(rules: Rules) -> OptimizerConfig:
    return OptimizerConfig(
        lr=rules.lr,
        warmup_steps=rules.warmup_steps,
        min_lr_ratio=rules.min_lr_ratio,
        max_grad_norm=rules.max_grad_norm,
    )


def distances(
    make_rank: MakeRank,
    make_critic_rank: MakeRank,
    model: Path,
    case: str,
    *,
    strips: bool = False,
    **wrong: Any,
) -> Iterator[float]:
    """After each update: how far the farthest two weights of ours and the oracle's are apart."""
    config, rules = CASES[case]
    start = perturbed(weights_of(model), seed=7, scale=SCALE)
    learner = LearnerConfig(
        num_epochs=rules.num_epochs,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        verl={"optimizer": {"override_optimizer_config": {"eps": rules.eps}}},
    )
    critic = make_critic_rank(learner) if rules.critic else None
    ours = Ours(make_rank(learner, config), critic, start, rules)
    theirs = Oracle(model, start, replace(rules, **wrong))
    for update in range(NUM_UPDATES):
        groups = recorded(update, strips)
        steps = mini_batches(groups, update)
        ours.update(groups, steps)
        theirs.update(groups, steps)
        yield max(
            distance(ours.policy, theirs.policy), distance(critic, theirs.critic) if rules.critic else 0.0
        )


def distance(ours: Any, model: torch.nn.Module) -> float:
    theirs = dict(model.named_parameters())
    return max(float((tensor - theirs[name]).detach().abs().max()) for name, tensor in ours.weights())


def test_policy_reference_and_record_are_8_nats_apart(tiny_model: Path) -> None:
    """And most mini-batches do not fit through our model at once."""
    model = Oracle(
        tiny_model, perturbed(weights_of(tiny_model), seed=7, scale=SCALE), CASES["rloo, k3 in the reward"][1]
    )
    from_reference, from_record, sizes = [], [], []
    for update in range(NUM_UPDATES):
        groups = recorded(update)
        rollouts = oracle.rollouts_of(groups)
        with torch.no_grad():
            said = model.logprobs(model.policy, rollouts), model.logprobs(model.reference, rollouts)
        policy, reference = (torch.cat([row for rows in each for row in rows]) for each in said)
        record = torch.cat([oracle.recorded(turns) for each in rollouts for turns in each.sequences])
        from_reference.append(float((policy - reference).abs().max()))
        from_record += [float((policy - record).min()), float((policy - record).max())]
        for step in mini_batches(groups, update):
            members = [each for each in rollouts if each.trajectory.rollout_id in step]
            ends = [sequence[-1] for each in members for sequence in each.sequences]
            sizes.append(sum(turn.num_prompt_tokens + turn.num_completion_tokens for turn in ends))
    assert median(sizes) > 1.5 * MICRO_BATCH_TOKENS
    assert max(from_reference) > 8
    assert min(from_record) < -8
    assert max(from_record) > 8


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_learner_written_from_papers(
    make_rank: MakeRank, make_critic_rank: MakeRank, tiny_model: Path, case: str
) -> None:
    found = list(distances(make_rank, make_critic_rank, tiny_model, case))
    assert len(found) == NUM_UPDATES
    assert max(found) <= TOLERANCE


ON_TREES = ["grpo, k3 in the loss", "gspo, recorded, k1+ in the loss", "ppo, recorded, k3 in the loss"]


@pytest.mark.parametrize("case", ON_TREES)
def test_weights_are_those_of_the_oracle_on_trees(
    make_rank: MakeRank, make_critic_rank: MakeRank, tiny_model: Path, case: str
) -> None:
    """A mini-batch has three trajectories with stripped thoughts; the oracle computes each turn alone."""
    rollouts = [each for group in recorded(0, strips=True) for each in group.trajectories]
    samples = [sample for each in rollouts for sample in training_samples(each)]
    assert len(samples) == 18
    assert num_rows(samples, MICRO_BATCH_TOKENS) < 9
    found = list(distances(make_rank, make_critic_rank, tiny_model, case, strips=True))
    assert len(found) == NUM_UPDATES
    assert max(found) <= TOLERANCE


@pytest.mark.parametrize("mistake", WRONG)
def test_mistake_in_the_formulas_would_be_seen(
    make_rank: MakeRank, make_critic_rank: MakeRank, tiny_model: Path, mistake: str
) -> None:
    case, wrong = WRONG[mistake]
    found = distances(make_rank, make_critic_rank, tiny_model, case, **wrong)
    assert max(islice(found, 3)) > 10 * TOLERANCE
