"""Frozen linear layers in four bits, beneath adapters.

A weight is one of 16 levels times the scale of its block of a row: NF4, of Dettmers et al. 2023 (QLoRA),
section 3. Bytes and scales are parameters like any other, whose rows FSDP2 shards and a checkpoint keeps.
torchao's tensor of this kind takes no slice of rows, and by default no layer of 576 x 576.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from environments.errors import ConfigError
from policies.learning.verl.fields import QUANTIZATION

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution."""
WEIGHTS_PER_SCALE = 64
"""The size of a block."""
SCALES = "_scales"
"""End of the name of a weight's scales, after the weight's own."""


class FourBitLinear(torch.nn.Module):
    """A frozen linear layer. A byte of its weight has two numbers; scales are in bfloat16, which no precision
    of the computation rounds.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        weight, scales = packed(layer.weight.detach())
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight_scales = torch.nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(inputs, self.weight, self.weight_scales, self.bias)
        return product


class _Product(torch.autograd.Function):
    """Product with a weight that is whole only meanwhile: the backward pass makes it anew."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: Any) -> Any:
        ctx.save_for_backward(weight, scales)
        return linear(inputs, whole(weight, scales).to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient @ whole(*ctx.saved_tensors).to(gradient.dtype), None, None, None


def put_in_four_bits(module: Any) -> None:
    """Keep the frozen linear layers of ``module`` so, but for the output layer. One whose rows are no whole
    number of blocks stays as it is.

    Raises:
        ConfigError: all of them do.
    """
    output = module.get_output_embeddings()
    left_out = {output, getattr(output, "base_layer", None)}  # it may have an adapter
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            is_linear = type(layer) is torch.nn.Linear and layer not in left_out
            if is_linear and not layer.weight.requires_grad and not layer.in_features % WEIGHTS_PER_SCALE:
                setattr(parent, name, FourBitLinear(layer))
    if not any(isinstance(each, FourBitLinear) for each in module.modules()):
        raise ConfigError(
            f"learner.verl.model.override_config.{QUANTIZATION}.load_in_4bit=true would have no effect: the "
            f"model has no torch.nn.Linear whose rows are a multiple of {WEIGHTS_PER_SCALE}. Leave it out."
        )


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [rows, columns / 2] of a weight, and scales of its blocks."""
    blocks = weight.float().unflatten(1, (-1, WEIGHTS_PER_SCALE))
    scales = blocks.abs().amax(-1).bfloat16()
    levels = torch.tensor(LEVELS, device=weight.device)
    shares = blocks / scales.float().clamp(min=1e-30).unsqueeze(-1)
    nearest = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2, out_int32=True).flatten(1).byte()
    return nearest[:, ::2] * 16 + nearest[:, 1::2], scales


def whole(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight [rows, columns] in float32 of its bytes and scales."""
    levels = torch.tensor(LEVELS, device=weight.device)
    numbers = levels[torch.stack((weight >> 4, weight & 15), -1).int()]
    return (numbers.flatten(1).unflatten(1, (-1, WEIGHTS_PER_SCALE)) * scales.float().unsqueeze(-1)).flatten(
        1
    )


def numbers_in(tensor: torch.Tensor) -> int:
    """Weights in an element of ``tensor``: a byte has two."""
    return 2 if tensor.dtype == torch.uint8 else 1


def unpacked(name: str, tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The tensor of this name, and the whole one of a weight in four bits."""
    tensor = tensor_of(name)
    return whole(tensor, tensor_of(name + SCALES)) if numbers_in(tensor) > 1 else tensor
