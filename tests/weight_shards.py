"""Shards of weights as the ranks of a learner write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from policies.engines.weights import shard_name

if TYPE_CHECKING:
    import torch


def shards_of(
    tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Shards of one of ``num_ranks``: FSDP2 cuts a tensor into chunks of rows; the last may be empty.

    A scalar is on all of them, and the first writes it.
    """
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or num_ranks == 1:
            if rank == 0:
                yield name, tensor
            continue
        size = -(-len(tensor) // num_ranks)
        if len(rows := tensor[rank * size : (rank + 1) * size]):
            yield shard_name(name, rank * size, len(tensor)), rows
