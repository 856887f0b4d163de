"""Weights that an engine takes, by vLLM's own way to reload a model: which of them it misses."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policies.engines.vllm import _load_into_worker
from policies.engines.weights import pack


class Model(torch.nn.Module):
    """Two layers, an attention between them, and a tied output; it takes weights as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = (torch.nn.Linear(3, 3, bias=False) for _ in range(2))
        self.attention = torch.nn.Module()
        self.tied = torch.nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def worker() -> Any:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    # As latent attention's W_UV, which vLLM makes when it has loaded the others.
    model.attention.made = torch.nn.Parameter(torch.zeros(2))
    settings = SimpleNamespace(quantization=None, dtype=torch.float32)
    return SimpleNamespace(model_runner=SimpleNamespace(model=model, model_config=settings))


def test_weight_that_vllm_makes_or_ties_is_not_missed(worker: Any) -> None:
    weights = {"first.weight": torch.ones(3, 3), "other.weight": torch.full((3, 3), 2.0)}
    assert not _load_into_worker(worker, list(pack(weights.items())))
    model = worker.model_runner.model
    assert torch.equal(model.other.weight, weights["other.weight"])


def test_weight_that_is_missing_is_named(worker: Any) -> None:
    assert _load_into_worker(worker, list(pack([("first.weight", torch.ones(3, 3))]))) == {"other.weight"}
