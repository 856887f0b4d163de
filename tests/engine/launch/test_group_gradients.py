"""The part that a group has in the gradient of an update, by two ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
from learner_samples import MakeRank, ragged_samples

from launch.training.recomputation import group_parts, share_of_loss
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch
from policies.learning.settings import AlgorithmConfig


@pytest.mark.parametrize(
    "config",
    [
        *(AlgorithmConfig(name=name) for name in ("grpo", "dr_grpo", "gspo", "rloo")),
        AlgorithmConfig(name="custom", advantage="grpo", loss="geo_mean"),
    ],
    ids=lambda config: config.loss or config.name,
)
def test_gradient_of_a_group_is_its_part_of_the_whole(config: AlgorithmConfig, make_rank: MakeRank) -> None:
    samples = [
        replace(each, sample_id=f"{index % 2:08d}/{index // 4:04d}#{index // 2 % 2}")
        for index, each in enumerate(ragged_samples(7))
    ]
    batch = TrainBatch(samples=tuple(samples))
    parts = group_parts([batch])
    assert list(parts) == ["00000000", "00000001"]
    for group_id, part in parts.items():
        rank = make_rank(algorithm=config)
        alone = rank.update([part]).metrics["learn/grad_norm"]
        # The same group in the whole batch, in which nothing is to be learned from the others.
        others = [
            each
            if each.sample_id.startswith(group_id)
            else replace(each, advantages=(0.0,) * len(each.advantages))
            for each in samples
        ]
        rank = make_rank(algorithm=config)
        whole = rank.update([replace(batch, samples=tuple(others))]).metrics["learn/grad_norm"]
        share = share_of_loss(part, parts, resolve(config, 160, 0, 1))
        assert alone * share == pytest.approx(whole, rel=1e-4), group_id
        assert whole > 0
