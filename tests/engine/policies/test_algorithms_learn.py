"""Every algorithm trains a policy upward: credit, correction, loss and optimizer together, without an engine.

The task is the smallest: even token ids are right. ``tests/benchmarks/evidence/algorithms.py`` has a game.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers_reference import load

from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from policies.learning.algorithms import SHIPPED, resolve
from policies.learning.credit import assign_credit
from policies.learning.samples import TrainBatch, TrainingSample, training_samples
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 8, 8, 6
NUM_UPDATES = 4
LEAST_GAIN = 0.2
"""Of the mean reward, which is about 0.5 before."""
SETTINGS = LearnerConfig(optimizer=OptimizerConfig(lr=2e-2))


class Player:
    """Samples from the learner's weights, as an engine would, and judges what it has sampled."""

    def __init__(self, model_path: Path) -> None:
        self._model = load(model_path)
        self._random = torch.Generator().manual_seed(0)

    def play(self, rank: Any, number: int, with_baseline: bool) -> list[TrajectoryGroup]:
        """The groups of update ``number``, each with a greedy rollout where a baseline is asked for."""
        self._model.load_state_dict(dict(rank.weights()), strict=False)
        prompts = torch.randint(300, (NUM_GROUPS, 5), generator=self._random)
        sampled = self._trajectories(prompts.repeat_interleave(GROUP_SIZE, dim=0), f"{number}", greedy=False)
        greedy = self._trajectories(prompts, f"{number}/greedy", greedy=True) if with_baseline else []
        return [
            TrajectoryGroup(
                group_id=f"{number}/{index}",
                task={},
                trajectories=tuple(sampled[index * GROUP_SIZE :][:GROUP_SIZE]),
                baseline=greedy[index] if greedy else None,
            )
            for index in range(NUM_GROUPS)
        ]

    @torch.no_grad()
    def _trajectories(self, prompts: torch.Tensor, name: str, greedy: bool) -> list[Trajectory]:
        ids, columns = prompts, []
        for _ in range(NUM_TOKENS):
            logprobs = self._model(ids).logits[:, -1].float().log_softmax(-1)
            choice = logprobs.exp().multinomial(1, generator=self._random)
            token = logprobs.argmax(-1, keepdim=True) if greedy else choice
            columns.append(logprobs.gather(1, token))
            ids = torch.cat([ids, token], dim=1)
        return [
            trajectory(f"{name}/{index}", prompt, said, spoken)
            for index, (prompt, said, spoken) in enumerate(
                zip(
                    prompts.tolist(),
                    ids[:, prompts.shape[1] :].tolist(),
                    torch.cat(columns, 1).tolist(),
                    strict=True,
                )
            )
        ]


def trajectory(name: str, prompt: list[int], said: list[int], logprobs: list[float]) -> Trajectory:
    completion = Completion(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(said),
        logprobs=tuple(logprobs),
        text="",
        finish_reason="stop",
    )
    reward = sum(token % 2 == 0 for token in said) / len(said)
    return Trajectory(
        rollout_id=name,
        steps=[Step(completion=completion, reward=reward)],
        reward=reward,
        termination_reason=TerminationReason.ENV_DONE,
    )


def halves(samples: Sequence[TrainingSample]) -> list[TrainBatch]:
    """Two mini-batches, so that the second is learned from at a ratio other than 1."""
    middle = len(samples) // 2
    return [TrainBatch(samples=tuple(samples[:middle])), TrainBatch(samples=tuple(samples[middle:]))]


def flat(batches: Sequence[TrainBatch]) -> list[TrainingSample]:
    return [sample for batch in batches for sample in batch.samples]


@pytest.mark.parametrize("name", sorted(SHIPPED - {"distillation"}))  # it learns from no reward
def test_algorithm_raises_the_reward(
    make_rank: MakeRank, make_critic_rank: MakeRank, tiny_model: Path, name: str
) -> None:
    config = AlgorithmConfig(name=name)
    algorithm = resolve(config, NUM_TOKENS)
    rank = make_rank(SETTINGS, config)
    rank.begin_phase(SETTINGS.optimizer, NUM_UPDATES)
    critic = make_critic_rank(SETTINGS) if algorithm.uses_critic else None
    if critic is not None:
        critic.begin_phase(OptimizerConfig(lr=5e-3), NUM_UPDATES)

    player, rewards = Player(tiny_model), []
    for number in range(NUM_UPDATES + 1):
        groups = player.play(rank, number, algorithm.uses_greedy_baseline)
        played = [each for group in groups for each in group.trajectories]
        rewards.append(sum(each.reward for each in played) / len(played))
        batches = rank.score(halves([sample for each in played for sample in training_samples(each)]))
        if critic is not None:
            values = [row for rows in critic.values(batches) for row in rows]
            rows = zip(flat(batches), values, strict=True)
            batches = halves([replace(sample, values=row) for sample, row in rows])
        samples = {sample.rollout_id: [sample] for sample in flat(batches)}
        credited, _ = assign_credit(groups, samples, algorithm, kl_coef=0.0)
        batches = halves([sample for each in credited.values() for sample in each])
        if critic is not None:
            critic.update(batches)
        rank.update(batches)

    assert rewards[-1] - rewards[0] > LEAST_GAIN, rewards
