"""Linear layers in four bits: what they keep, compute, and hand back for learning."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from environments.errors import ConfigError
from policies.learning.verl.four_bits import (
    LEVELS,
    WEIGHTS_PER_SCALE,
    FourBitLinear,
    packed,
    put_in_four_bits,
    whole,
)


def weight(rows: int = 96, columns: int = 576) -> torch.Tensor:
    return 0.02 * torch.randn((rows, columns), generator=torch.Generator().manual_seed(0))


def test_weight_takes_four_and_a_quarter_bits_and_is_near() -> None:
    given = weight()
    numbers, scales = packed(given)
    assert 8 * (numbers.nbytes + scales.nbytes) == 4.25 * given.numel()
    assert (whole(numbers, scales) - given).norm() / given.norm() < 0.093, "torchao's is 0.0921 away"


def test_weight_of_levels_stays_as_it_is() -> None:
    """So what is quantized once more is the same."""
    given = torch.tensor(LEVELS).repeat(3, WEIGHTS_PER_SCALE // len(LEVELS)) * torch.tensor(
        [[1.0], [0.5], [0.0]]
    )
    assert torch.equal(whole(*packed(given)), given)
    once = packed(weight())
    assert all(map(torch.equal, packed(whole(*once)), once))


@pytest.mark.parametrize("rows", [slice(0, 50), slice(50, 96), slice(96, 96)])
def test_shard_of_rows_needs_no_other_rows(rows: slice) -> None:
    numbers, scales = packed(weight())
    assert torch.equal(whole(numbers[rows], scales[rows]), whole(numbers, scales)[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_computes_and_derives_as_a_whole_one_does(dtype: torch.dtype) -> None:
    plain = torch.nn.Linear(576, 96, dtype=dtype)
    layer = FourBitLinear(plain)
    plain.weight.data = whole(layer.weight, layer.weight_scales).to(dtype)
    outputs, gradients = [], []
    for each in (layer, plain):
        inputs = weight(5).to(dtype).requires_grad_()
        outputs.append(each(inputs))
        outputs[-1].square().sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*outputs) and torch.equal(*gradients)


def test_nothing_whole_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    inputs = weight(5).requires_grad_()
    layer = FourBitLinear(torch.nn.Linear(576, 96, bias=False))
    with saved_tensors_hooks(lambda each: kept.append(each.nbytes) or each, lambda each: each):
        layer(inputs)
    assert sum(kept) == layer.weight.nbytes + layer.weight_scales.nbytes


@pytest.mark.slow
def test_output_layer_stays_whole_beneath_an_adapter_too() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    put_in_four_bits(adapted)
    assert type(model.lm_head.base_layer) is torch.nn.Linear
    assert type(model.model.layers[0].self_attn.q_proj.base_layer) is FourBitLinear


@pytest.mark.slow
def test_model_without_a_layer_for_four_bits_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=32)).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"load_in_4bit=true would have no effect: .* Leave it out"):
        put_in_four_bits(model)
