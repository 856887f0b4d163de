"""Rows that several ranks compute together: sequence parallelism, as in DeepSpeed Ulysses (arXiv 2309.14509).

Ranks of a sequence group have the same samples, and each puts an equal part of every row's columns through
the model. Within attention they exchange: a rank has all columns there, of its share of the heads. So masks
and trees are those of whole rows. What the loss reads is summed up over the group, and each of its ranks
computes the whole loss.

verl makes the groups, and exchanges heads for columns. What it has for the rest is for packed rows of flash
attention.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)

from environments.errors import ConfigError
from policies.learning.settings import SEQUENCE_RANKS
from policies.learning.verl.fields import SCALED_BY_LENGTH
from policies.learning.verl.token_trees import SDPA, attend_along_paths, obstacle


def own_part() -> tuple[int, int]:
    """Return which part of each row this rank computes, and the number of parts. For use within a pass."""
    return get_ulysses_sequence_parallel_rank(), get_ulysses_sequence_parallel_world_size()


def of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """The values that all ranks of the group have computed, each with 0 in the places of the others.

    The gradient is that of a rank's own values, times the number of ranks: all of them compute the same loss,
    and FSDP takes the mean of their gradients.
    """
    group = get_ulysses_sequence_parallel_group()
    if group is None:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return total + dist.get_world_size(group) * (values - values.detach())


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``attend_along_paths`` for a rank's part of the columns; ``attention_mask`` is that of whole rows."""
    if get_ulysses_sequence_parallel_group() is None:
        return attend_along_paths(module, query, key, value, attention_mask, **kwargs)
    _, num_ranks = own_part()
    # Heads of keys and values that cannot be shared out evenly are repeated until they can.
    copies = math.lcm(key.shape[1], num_ranks) // key.shape[1]
    query, key, value = (
        gather_seq_scatter_heads(each, seq_dim=2, head_dim=1)
        for each in (query, repeat_kv(key, copies), repeat_kv(value, copies))
    )
    heads: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    output, _ = attend_along_paths(heads, query, key, value, attention_mask, **kwargs)
    return gather_heads_scatter_seq(output, head_dim=2, seq_dim=1), None


def check_model(module: torch.nn.Module, config: PreTrainedConfig, num_ranks: int, pictures: bool) -> None:
    """Raise ``ConfigError`` unless ``num_ranks`` can compute a row of this model together."""
    num_heads = config.get_text_config().num_attention_heads
    reason = "it reads pictures" if pictures else obstacle(module, config)
    kinds = {str(getattr(each, "rope_type", "")) for each in module.modules()}
    if scaled := next((name for name in SCALED_BY_LENGTH if any(name in kind for kind in kinds)), None):
        reason = reason or f"its rope_type {scaled} turns a token by its row's length, and each has a part"
    if num_heads % num_ranks:
        reason = reason or f"it has {num_heads} attention heads, which is no multiple of {num_ranks}"
    if reason is not None:
        raise ConfigError(
            f"{SEQUENCE_RANKS}={num_ranks} cannot be for a model of type {config.model_type!r}: {reason}. "
            "Leave it out, and set learner.micro_batch_tokens to the longest sample."
        )


def install() -> None:
    """Have transformers' models use ``attend`` in this process."""
    ALL_ATTENTION_FUNCTIONS.register(SDPA, attend)
