"""Rows of a micro-batch as trees of tokens: what samples have in common at their beginning is computed once.

Members of a group share their prompt; the turns of a trajectory whose history was rewritten share it up to
the place; forks share what was sampled before them. Three samples, and the row that holds them:

    p p p a b        token       p p p a b c d e f
    p p p c d e      position    0 1 2 3 4 3 4 5 4
    p p p c f        end         - - - 5 5 - 8 8 -

    p p p --+-- a b
            +-- c --+-- d e
                    +-- f

1. Samples of a row stand in the order of their ids. So what one has in common with any before it, it has in
   common with its neighbour: a tree is written as two numbers for each sample, its row and that length.
2. Each prefix that occurs among a row's samples is one token of the row, computed once, forward and backward.
3. The path of a sample is where its tokens stand. A token's position is its depth. It sees its path and
   nothing else: those at or before it whose subtree has not ended, ``i <= j < end[i]``.
4. A token is predicted by its parent, once. All samples that it belongs to read this log-probability, and
   each weighs, clips and corrects it by columns of its own. The gradient is that of flat rows, but for
   rounding.
5. A token has no role: roles are the samples'. What a turn has sampled is context in a turn after it, whose
   prompt holds it, and in a branch whose ``loss_mask`` is 0 there. It is trained by the sample whose mask is
   1, and by both if two members happened to sample the same.
6. The attention is torch's, for ``BLOCK`` tokens at a time over those that any of them sees. So a mask is as
   large as a block times a path, and a token is paired with those off its path for its block's sake only.
   On a GPU it is FlexAttention, which does so by tiles.
7. A row has at most as many tokens as fit through the model at once, and gets another sample only where that
   saves more than those pairs cost.
8. Flash attention knows no such mask. With it samples share nothing, and a micro-batch is one row of them,
   one after the other: it tells them apart by positions that begin anew, and no token is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from policies.learning.rows import BLOCK

ROW, SHARED = "row", "shared"
"""Columns of a micro-batch [N], by which each sample is a ``Branch``; a row's samples are neighbours."""
KEPT_KEYS = 3
"""Keys that the blocks of a row see, all of them together, as a multiple of its tokens: up to so many are
kept for the backward pass, with their values. More of them would be much of an update's memory."""
PAIRS_PER_WIDTH = 3
"""Pairs of tokens off every path that cost at most as much as one token in all the rest of a model, as a
multiple of the model's width."""
NO_END = torch.iinfo(torch.int64).max
SDPA = "sdpa"
FULL_ATTENTION, WINDOW = "full_attention", "sliding_attention"
FLASH = "flash_attention"
"""Beginning of the names of flash attention, whose kernels are for GPUs and for numbers of two bytes."""


def obstacle(module: torch.nn.Module, config: PreTrainedConfig) -> str | None:
    """Return why a model has to be learned from flat rows; None if each of its layers sees what ``Layout``
    says: none is recurrent, has a window, or makes something of its own of the mask, as alibi does.

    Args:
        module: the model, which adapters may be wrapped around.
    """
    text = config.get_text_config()  # of a model that reads pictures too
    # Some configurations list the types of their layers, some compute them, and many have neither.
    layers = set(getattr(text, "layer_types", None) or [FULL_ATTENTION])
    if others := layers - {FULL_ATTENTION}:
        return f"it has layers of {', '.join(sorted(others))}"
    if getattr(text, "sliding_window", None) is not None:
        return f"its attention has a window of {text.sliding_window} tokens"
    if getattr(text, "alibi", False):
        return "alibi counts positions by the attention mask"
    for model in (each for each in module.modules() if isinstance(each, PreTrainedModel)):
        if model.config._attn_implementation != SDPA:
            return f"its attention is {model.config._attn_implementation}, not {SDPA}"
        if not model._supports_attention_backend:
            return f"{type(model).__name__} has an attention of its own"
        if model._is_stateful:
            return "it has recurrent layers"
    return None


def packs(module: torch.nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether a micro-batch is one row of samples with nothing in common: flash attention tells them
    apart in each layer."""
    text = config.get_text_config()
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    return set(getattr(text, "layer_types", None) or [FULL_ATTENTION]) <= {FULL_ATTENTION, WINDOW} and all(
        (each.config._attn_implementation or "").startswith(FLASH)
        and each._supports_attention_backend
        and not each._is_stateful
        for each in models
    )


def pairs_per_token(module: torch.nn.Module, config: PreTrainedConfig) -> int:
    """Return how many pairs of tokens off every path are worth one token saved; 0 if rows have to be flat."""
    return 0 if obstacle(module, config) else PAIRS_PER_WIDTH * config.get_text_config().hidden_size


# -- what the model computes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A micro-batch of rows as the model's input.

    Attributes:
        input_ids, positions: [rows, longest row].
        ends: [rows, longest row]: the column at which a token's subtree has ended; 0 for padding.
        paths: [T] place in the flattened rows of each token of all samples, one sample after the other.
        depths: [T] its place in its sample.
        lengths: [rows].
        own: columns that this rank puts through the model.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    paths: torch.Tensor
    depths: torch.Tensor
    lengths: torch.Tensor
    has_branches: bool
    own: slice

    @classmethod
    def of(
        cls, micro_batch: TensorDict, beside: Sequence[torch.Tensor] = (), part: tuple[int, int] = (0, 1)
    ) -> Layout:
        """The layout of samples in verl's columns and those of ``Branch``.

        Args:
            beside: ids of further rows, after theirs and of no sample.
            part: which of how many equal parts of the columns is this rank's.
        """
        rows: list[list[tuple[torch.Tensor, int]]] = []
        last = None
        numbers, shared = micro_batch[ROW].tolist(), micro_batch[SHARED].tolist()
        for ids, row, common in zip(micro_batch["input_ids"].unbind(), numbers, shared, strict=True):
            if row == last:
                rows[-1].append((ids, common))
            else:
                rows.append([(ids, 0)])
                last = row
        grown = [_grow(row) for row in rows]
        others = [_grow([(ids, 0)]) for ids in beside]
        lengths = micro_batch["input_ids"].new_tensor([len(each.ids) for each in grown + others])
        index, num_parts = part
        size = -(-int(lengths.max()) // num_parts)
        width = size * num_parts

        def padded(rows: list[torch.Tensor]) -> torch.Tensor:
            table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return torch.nn.functional.pad(table, (0, width - table.shape[1]))

        return cls(
            input_ids=padded([each.ids for each in grown + others]),
            positions=padded([each.depths for each in grown + others]),
            ends=padded([each.ends for each in grown + others]),
            paths=torch.cat([path + width * row for row, each in enumerate(grown) for path in each.paths]),
            depths=torch.cat([each.depths[path] for each in grown for path in each.paths]),
            lengths=lengths,
            has_branches=len(grown) < len(numbers),
            own=slice(index * size, (index + 1) * size),
        )

    def attention_mask(self) -> torch.Tensor:
        """Return what is no padding [rows, longest row], or ``ends`` [rows, 1, 1, longest row] where samples
        share a row, or ranks do, for ``attend_along_paths``."""
        if self.has_branches or self.own != slice(0, self.input_ids.shape[1]):
            return self.ends[:, None, None]
        return torch.arange(self.input_ids.shape[1], device=self.ends.device) < self.lengths.unsqueeze(1)

    def parents(self) -> torch.Tensor:
        """Return the place of the token that predicts each token [rows x longest row]; any for a root."""
        parents = torch.zeros_like(self.input_ids).flatten()
        has_parent = self.depths > 0
        parents[self.paths[has_parent]] = self.paths.roll(1)[has_parent]
        return parents


class _Grown(NamedTuple):
    """A row: its tokens, and where the samples' stand."""

    ids: torch.Tensor
    depths: torch.Tensor
    ends: torch.Tensor
    paths: list[torch.Tensor]


def _grow(samples: Sequence[tuple[torch.Tensor, int]]) -> _Grown:
    """The row of samples, each with the number of first tokens that the one before has too."""
    length = sum(len(ids) - common for ids, common in samples)
    row = samples[0][0].new_empty(length)
    depths, ends = torch.empty_like(row), torch.full_like(row, NO_END)
    paths: list[torch.Tensor] = []
    path, start = row[:0], 0
    for ids, common in samples:
        stop = start + len(ids) - common
        ends[path[common:]] = start
        row[start:stop] = ids[common:]
        depths[start:stop] = torch.arange(common, len(ids), device=row.device)
        path = torch.cat((path[:common], torch.arange(start, stop, device=row.device)))
        paths.append(path)
        start = stop
    return _Grown(row, depths, ends, paths)


# -- attention -----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Neighbouring tokens of all rows, and what they see.

    Attributes:
        keys: [K] columns that any of them sees, in any of the rows.
        sees: [rows, 1, size of the block, K].
    """

    queries: slice
    keys: torch.Tensor
    sees: torch.Tensor


@lru_cache(maxsize=1)  # once for all layers
def blocks(ends: torch.Tensor) -> list[Block]:
    """The blocks of rows with these ``ends`` [rows, 1, 1, longest row].

    Padding sees the last path of its row: a token that sees nothing would be NaN.
    """
    ends = ends[:, 0]
    column = torch.arange(ends.shape[-1], device=ends.device)
    found = []
    for queries in (slice(start, start + BLOCK) for start in range(0, len(column), BLOCK)):
        query = column[queries].unsqueeze(1)
        keys = ((column <= query[-1]) & (ends > query[0]).any(0)).flatten().nonzero().flatten()
        sees = (keys <= query) & (query < ends[..., keys])
        found.append(Block(queries, keys, sees.unsqueeze(1)))
    return found


def attend_along_paths(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """torch's attention as transformers calls it, for trees too, whose mask is of integers."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        flat: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return flat
    if query.is_cuda and query.dtype != torch.float64 and not kwargs.get("dropout"):
        return _attend_at_once(query, key, value, attention_mask, kwargs.get("scaling")), None
    found, attend = blocks(attention_mask), _attend
    if sum(len(block.keys) for block in found) > KEPT_KEYS * attention_mask.shape[-1]:
        # Each block would keep a copy of the keys and values that it sees: the backward pass makes them anew.
        attend = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
    parts = [attend(module, query, key, value, block, kwargs) for block in found]
    return torch.cat(parts, dim=1), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: Block,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    output: torch.Tensor = sdpa_attention_forward(
        module,
        query[:, :, block.queries],
        key.index_select(2, block.keys),
        value.index_select(2, block.keys),
        block.sees,
        **kwargs,
    )[0]
    return output


@lru_cache(maxsize=1)  # once for all layers
def pairs_seen(ends: torch.Tensor) -> BlockMask:
    """The pairs of tokens of rows with these ``ends`` [rows, 1, 1, longest row] in FlexAttention's form."""
    rows, length = ends.shape[0], ends.shape[-1]
    of_keys = ends[:, 0, 0]

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < of_keys[row, key])

    return create_block_mask(sees, rows, None, length, length, device=str(ends.device))


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def _attend_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """FlexAttention, which has a backward pass on a GPU only: there it skips what no token of a tile sees."""
    shares_keys = query.shape[1] != key.shape[1]
    mask = pairs_seen(ends)
    output = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=shares_keys)
    return output.transpose(1, 2).contiguous()
