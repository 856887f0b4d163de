"""An engine without a model, for tests of the transports of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from policies.engines.weights import WeightBucket, WholeTensors

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


class RecordingEngine:
    """Remembers what was loaded into it."""

    def __init__(self) -> None:
        self.version = 0
        self.loaded: Tensors = {}

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self.version = version
        self.loaded = {name: tensor.clone() for name, tensor in WholeTensors(buckets).items()}
