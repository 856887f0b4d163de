"""The weights of a sharded model: gathered, cut by checkpoint name, merged with adapters, swapped in place.

What gathers is collective: all ranks call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from environments.errors import ConfigError
from policies.engines.weights import shard_name

ADAPTER = "default"
"""The name under which peft keeps the one adapter that there is."""
ROUTERS = ("gate", "router")
"""Names of the module that chooses the experts of a token, beside the experts."""
NAMES_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Layers that peft takes for those of experts, in models that have any."""


def trainable(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that the optimizer moves, by name: this rank's shards themselves, not copies."""
    for each in module.modules():
        if isinstance(each, FSDPModule):  # after a forward pass it may still hold the gathered weights
            each.reshard()
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def gathered(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole ``tensors`` on rank 0, in host memory; none on the others."""
    whole = ((name, full_tensor(tensor)) for name, tensor in tensors)
    is_first = dist.get_rank() == 0
    kept = ((name, full.detach().to("cpu", copy=True) if is_first else None) for name, full in whole)
    return {name: full for name, full in kept if full is not None}


@torch.no_grad()
def fill(tensors: Mapping[str, torch.Tensor], whole_tensor: Callable[[str], torch.Tensor]) -> None:
    """Fill ``tensors``, sharded or not, from the whole ones of the same names."""
    for name, tensor in tensors.items():
        full = whole_tensor(name).to(tensor.device)
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        local(tensor).copy_(local(full))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All shards of ``tensor`` put together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Reference:
    """The policy as it was when this object was made, on the same ranks, in host memory.

    It keeps a copy of what is trained: of all weights, or of the adapters alone. No second engine is needed:
    for a forward pass of the reference its weights and the policy's change places.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._shards = {
            name: local(tensor).detach().to("cpu", copy=True) for name, tensor in trainable(module).items()
        }

    @contextmanager
    def in_place(self) -> Iterator[dict[str, torch.Tensor]]:
        """Let the module, whose trained tensors these are, compute what the reference does."""
        self._exchange()
        try:
            yield trainable(self._module)
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, tensor in trainable(self._module).items():
            here, kept = local(tensor), self._shards[name]
            policy = here.to("cpu", copy=True)
            here.copy_(kept)
            kept.copy_(policy)


# -- adapters ------------------------------------------------------------------------------------------


def is_adapters(name: str) -> bool:
    """True for the name of a part of an adapter."""
    return ".lora_" in name


def delta(
    module: torch.nn.Module, name: str, whole_tensor: Callable[[str], torch.Tensor]
) -> torch.Tensor | None:
    """Change of the weight of this name by its adapter, (alpha / rank) B A; ``None`` without one.

    Source: Hu et al. 2021 (LoRA), section 4.1. verl's own export would round to bfloat16.
    """
    stem = name.removesuffix(".base_layer.weight")
    if stem == name:
        return None
    down, up = (whole_tensor(f"{stem}.lora_{part}.{ADAPTER}.weight") for part in "AB")
    layer: Any = module.get_submodule(stem)
    product = layer.scaling[ADAPTER] * (up @ down)
    return product.T if layer.fan_in_fan_out else product


class OwnRows(NamedTuple):
    """A shard of an exported tensor, and its place in what a rank has of the model's tensor, flat."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def own_rows(name: str, whole: torch.Tensor, start: int, num_own: int) -> Iterator[OwnRows]:
    """The shard of an exported tensor that a rank has; nothing where it has none.

    Args:
        whole: the exported tensor without its memory, as a view of the model's.
        start: place in the model's tensor of what the rank has of it.
        num_own: how much that is.
    """
    offset, size = whole.storage_offset(), whole.numel()
    begin, end = max(start, offset), min(start + num_own, offset + size)
    if begin >= end:
        return
    shape = tuple(whole.shape)
    if end - begin < size:
        name = shard_name(name, (begin - offset) * len(whole) // size, len(whole))
        shape = (-1, *shape[1:])
    yield OwnRows(name, shape, begin - start, end - start)


def layers_beside_experts(module: PreTrainedModel) -> list[str]:
    """The layers of a mixture of experts that may have an adapter, by name; none for any other model.

    transformers keeps the experts of a layer in one tensor, and peft would take all-linear for them too: such
    an adapter cannot be merged. peft also takes any layer for an expert that is called as experts once were,
    a shared expert's or a dense one's.
    """
    if not any(".experts." in name and each.dim() == 3 for name, each in module.named_parameters()):
        return []
    output = module.get_output_embeddings()
    return [
        name
        for name, each in module.named_modules()
        if isinstance(each, torch.nn.Linear)
        and each is not output
        and name.rpartition(".")[-1] not in NAMES_OF_EXPERTS
    ]


def freeze_routers(module: torch.nn.Module) -> None:
    """Train no router of a mixture of experts: it would come to choose other experts than those that have
    sampled, of which an engine tells nothing.
    """
    for layer in module.modules():
        if hasattr(layer, "experts"):
            for name in ROUTERS:
                if isinstance(router := getattr(layer, name, None), torch.nn.Module):
                    router.requires_grad_(False)


def check_adapters(module: torch.nn.Module, tied: bool) -> None:
    """Check that the adapters can be merged into the weights.

    Raises:
        ConfigError: one is on an embedding, or on an output layer that is the embedding too.
    """
    from peft.tuners.lora import Linear, LoraLayer

    for name, layer in module.named_modules():
        is_mergeable = isinstance(layer, Linear) and not (tied and base_name(name) == "lm_head")
        if isinstance(layer, LoraLayer) and not is_mergeable:
            raise ConfigError(
                f"learner.verl.model.target_modules puts an adapter on {base_name(name)!r}, which cannot be "
                "merged into the weights: name linear layers, neither tied nor experts, or all-linear."
            )


def base_name(name: str) -> str:
    """The name of a weight in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
