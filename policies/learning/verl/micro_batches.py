"""Micro-batches: the rows of a mini-batch that go through the model together.

verl counts the real tokens of a micro-batch, but its rows are padded to the longest: 63 rows of 48 tokens
with one of 1,000 were 64,000 tokens where 4,024 had been counted. These are bounded by their padded size, and
rows of like length go together. A row is a sample, or a tree of several. ``engine.install`` puts
``prepare_micro_batches`` in the place of verl's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from policies.learning.rows import Branch, Row, halves, num_tokens
from policies.learning.verl.token_trees import ROW, SHARED

PACKED = "packed"
"""Entry of a mini-batch: true if each of its micro-batches is one row."""
CALL_TOKENS = 128
"""A pass of the model costs what it does for its tokens and about as many more, however few they are."""


def prepare_micro_batches(
    data: TensorDict, dp_group: dist.ProcessGroup | None = None, same_micro_num_in_dp: bool = True
) -> tuple[list[TensorDict], list[list[int]]]:
    """The micro-batches of one rank's rows, and the rows of each; all ranks have equally many.

    Called by verl's engine, in the place of its own function of this name.
    """
    numbers, shared = data[ROW].tolist(), data[SHARED].tolist()
    lengths = data["input_ids"].offsets().diff().tolist()
    branches = [
        Branch(sample, common, length - common)
        for sample, (common, length) in enumerate(zip(shared, lengths, strict=True))
    ]
    rows = [list(row) for _, row in groupby(branches, key=lambda branch: numbers[branch.sample])]
    is_packed = bool(tu.get_non_tensor_data(data, PACKED, default=False))
    most = data["max_token_len_per_gpu"] * tu.get_non_tensor_data(data, "sp_size", default=1)
    division = (fill if is_packed else divide)([*map(num_tokens, rows)], most)
    parts = [[rows[index] for index in part] for part in division]
    if same_micro_num_in_dp and dp_group is not None:
        count = torch.tensor(len(parts), device=get_device_name())  # NCCL takes no tensors of the CPU
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
        parts = divide_further(parts, int(count))
    samples = [[branch.sample for row in part for branch in row] for part in parts]
    return [
        _micro_batch(data, [[*chain(*part)]] if is_packed else part, own)
        for part, own in zip(parts, samples, strict=True)
    ], samples


def _micro_batch(data: TensorDict, rows: Sequence[Row], samples: list[int]) -> TensorDict:
    micro_batch = tu.index_select_tensor_dict(data, samples)
    numbers = [number for number, row in enumerate(rows) for _ in row]
    micro_batch[ROW] = torch.tensor(numbers, device=micro_batch["input_ids"].device)
    return micro_batch


def divide(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of ``lengths`` in groups whose size, rows times the longest, is at most ``max_tokens``.

    Of all divisions of the rows sorted by length it is the one with the fewest padded tokens, where another
    group counts as ``CALL_TOKENS``. Within a group rows stay in order, so one group is the batch as it is.

    Args:
        lengths: tokens of each row, none above ``max_tokens``.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    longest = np.array([lengths[row] for row in order])
    cost = np.zeros(len(order) + 1)  # of the rows before this one
    begin = np.zeros(len(order) + 1, dtype=int)  # of the last group before this one
    for end in range(1, len(order) + 1):
        sizes = longest[:end] * np.arange(end, 0, -1)
        costs = np.where(sizes <= max_tokens, cost[:end] + sizes + CALL_TOKENS, np.inf)
        begin[end] = int(costs.argmin())
        cost[end] = costs[begin[end]]
    groups = []
    end = len(order)
    while end:
        groups.append(sorted(order[begin[end] : end]))
        end = begin[end]
    return groups[::-1]


def fill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of ``lengths`` in groups whose sum is at most ``max_tokens``: each, the longest first, is put into
    the first group with room for it.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        at = next((at for at, left in enumerate(room) if left >= lengths[row]), len(room))
        if at == len(room):
            groups.append([])
            room.append(max_tokens)
        groups[at].append(row)
        room[at] -= lengths[row]
    return [sorted(group) for group in groups]


def divide_further(groups: Sequence[Sequence[Row]], count: int) -> list[list[Row]]:
    """``count`` groups of rows: those with the most samples are halved until there are so many.

    Args:
        count: at most the number of samples.
    """
    divided = [list(group) for group in groups]
    while len(divided) < count:
        at = max(range(len(divided)), key=lambda index: sum(map(len, divided[index])))
        rows = divided[at]
        if len(rows) == 1:
            rows = [*halves(rows[0])]
        divided[at : at + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return divided
