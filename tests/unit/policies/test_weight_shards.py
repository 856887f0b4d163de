"""Shards of weights: cut by what a rank has, and put together by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from environments.errors import WeightsError
from policies.engines.weights import WholeTensors, pack, shard_name

if TYPE_CHECKING:
    import torch


def on_ranks(num_ranks: int, whole: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Place and values of what each rank has of ``whole``, flat, as FSDP2 cuts it."""
    size = -(-len(whole) // num_ranks)
    for rank in range(num_ranks):
        rows = whole[rank * size : (rank + 1) * size]
        yield rank * size * whole[0].numel(), rows.flatten()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shards_of_any_ranks_make_the_exported_tensors(verl_on_cpu: None, num_ranks: int) -> None:
    """Of a matrix, a vector, and of experts that are one tensor in the learner and many for the engines."""
    import torch
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    from policies.learning.verl.weights import own_rows

    held = {
        "matrix": torch.rand(5, 3),
        "vector": torch.rand(4),
        "layer.mlp.experts.gate_up_proj": torch.rand(3, 8, 2),
        "layer.mlp.experts.down_proj": torch.rand(3, 2, 4),
    }
    published = [
        (rows.name, own[rows.begin : rows.end].view(rows.shape))
        for name, whole in held.items()
        for start, own in on_ranks(num_ranks, whole)
        for exported, view in unfuse_moe_params([(name, whole.to("meta"))])
        for rows in own_rows(exported, view, start, len(own))
    ]
    found, expected = (
        WholeTensors(list(pack(published, bucket_bytes=40))),
        dict(unfuse_moe_params(held.items())),
    )
    assert set(found) == set(expected) and len(found) == 2 + 3 * 3
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_rows_that_are_missing_name_their_weight() -> None:
    import torch

    rows = torch.rand(2, 3)
    published = [("norm.weight", rows[0]), (shard_name("linear.weight", 2, 4), rows)]
    with pytest.raises(WeightsError, match=r"2 of the 4 rows of linear\.weight: .* every rank"):
        WholeTensors(list(pack(published)))
