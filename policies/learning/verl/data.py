"""A rank's samples in verl's layout."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from environments.columns import floats, stored
from environments.errors import LearnerError
from policies.learning.division import RankShard
from policies.learning.samples import TrainingSample
from policies.learning.verl import config as verl_config  # noqa: F401  # before verl: see there
from policies.learning.verl.engine import PICTURES
from policies.learning.verl.token_trees import ROW, SHARED

# isort: split
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

TRAJECTORY_SHARE = "trajectory_share"
"""Column of a micro-batch [N]: the part that a sample has of its trajectory's sampled tokens. It is 1 but
where a trajectory has several samples, since its history was rewritten."""


def supervised(shard: RankShard) -> TensorDict:
    """Make a batch for ``sft_loss``, whose ``loss_mask`` covers prompt and response."""
    masks = [
        torch.cat((torch.zeros(each.num_prompt_tokens, dtype=torch.int64), _tensor(each, "loss_mask")))
        for each in shard.samples
    ]
    return _table(shard, masks, {})


def unscored(shard: RankShard) -> TensorDict:
    """Make a batch for a forward pass without a loss."""
    return scored(shard, {})


def scored(shard: RankShard, columns: Mapping[str, str]) -> TensorDict:
    """Make a batch for a loss that reads ``columns`` (our name -> verl's), each [R].

    Raises:
        LearnerError: a sample lacks one of them.
    """
    tensors = {theirs: [_column(each, ours) for each in shard.samples] for ours, theirs in columns.items()}
    return _table(shard, [_tensor(each, "loss_mask") for each in shard.samples], tensors)


def responses(shard: RankShard, outputs: torch.Tensor) -> list[torch.Tensor]:
    """Return what the model put out [P + R] for each sample, cut to the response [R]."""
    # verl's column i belongs to token i+1: the response's begin one before its first token.
    return [
        output[sample.num_prompt_tokens - 1 : len(sample) - 1]
        for sample, output in zip(shard.samples, outputs.unbind(), strict=True)
    ]


def as_column(shard: RankShard, rows: Sequence[torch.Tensor]) -> list[array[float]]:
    """``rows``, [R] for each sample, as a column of it: kept where the mask is 1, and 0 in other places."""
    pairs = zip(rows, shard.samples, strict=True)
    return [floats((row * _tensor(sample, "loss_mask")).tolist()) for row, sample in pairs]


def _table(
    shard: RankShard, loss_masks: Sequence[torch.Tensor], columns: Mapping[str, list[torch.Tensor]]
) -> TensorDict:
    """Jagged tensors, one row a sample.

    The sum of ``loss_mask`` over all ranks is what token means divide by, ``global_batch_size`` what
    means over sequences do: padding, and what was masked altogether, counts in neither. A trajectory
    counts as one sequence, however many samples it has.
    """
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    prompts, responses = (
        [_tensor(each, name) for each in shard.samples] for name in ("prompt_ids", "response_ids")
    )
    tensors = {
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(sample)) for sample in shard.samples],
        "prompts": prompts,
        "responses": responses,
        "response_mask": [_tensor(each, "loss_mask") for each in shard.samples],
        "loss_mask": loss_masks,
        **columns,
    }
    return tu.get_tensordict(
        {name: nested(column) for name, column in tensors.items()}
        | ({PICTURES: [each.pictures for each in shard.samples]} if shard.has_pictures else {})
        | {
            TRAJECTORY_SHARE: torch.tensor(shard.trajectory_shares),
            ROW: torch.tensor([number for number, row in enumerate(shard.rows) for _ in row]),
            SHARED: torch.tensor([branch.shared for row in shard.rows for branch in row]),
        },
        non_tensor_dict={
            "temperature": shard.temperature,
            "global_batch_size": shard.num_trajectories,
        },
    )


def _column(sample: TrainingSample, name: str) -> torch.Tensor:
    values, size = stored(sample, name), len(stored(sample, "loss_mask"))
    if not sample.num_sampled_tokens:  # padding, or all of it was masked: whatever it holds counts nowhere
        return torch.zeros(size)
    if len(values) != size:
        raise LearnerError(
            f"Sample {sample.sample_id!r} has {len(values)} {name} for {size} response tokens: "
            "score and assign_credit come before update."
        )
    return _tensor(sample, name)


def _tensor(sample: TrainingSample, name: str) -> torch.Tensor:
    """The numbers of a field: whole ones in eight bytes each, others in torch's default."""
    values = stored(sample, name)
    given = np.asarray(values.read() if name in ("prompt_ids", "response_ids") else values)
    whole = given.dtype.kind == "i"
    return torch.as_tensor(given, dtype=torch.int64 if whole else torch.get_default_dtype())
