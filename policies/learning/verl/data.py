"""Training samples in verl's layout, and which rank takes which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from environments.errors import LearnerError
from policies.learning.samples import TrainBatch, TrainingSample, padding_sample
from policies.learning.verl import config as verl_config  # noqa: F401  # before verl: see there
from policies.learning.verl.micro_batches import SHARES_PROMPTS

# isort: split
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

ADVANTAGES = {"advantages": "advantages"}
"""Column of a sample whose tokens have weights."""
POLICY_COLUMNS = {"rollout_logprobs": "rollout_log_probs", **ADVANTAGES}
"""Our columns of a sample, and what verl's policy losses call them."""
OLD_LOGPROBS = {"old_logprobs": "old_log_probs"}
"""Column of a sample that was scored."""
VALUE_COLUMNS = {"values": "values", "returns": "returns"}
"""Our columns of a sample, and what verl's value loss calls them."""
TRAJECTORY_SHARE = "trajectory_share"
"""Column of a micro-batch [N]: the part that a sample has of its trajectory's sampled tokens. It is 1 but
where a trajectory has several samples, since its history was rewritten."""


class RankShard:
    """A rank's rows of a batch.

    The batch is filled up with padding rows until every rank has equally many; then the ranks' work is made
    as equal as it gets. All ranks come to the same partition. Rows with the same prompt stand next to each
    other, where they may share it; but for that a rank's order is the batch's.

    Args:
        max_tokens: most tokens that fit through the model at once.
        shares_prompts: whether samples with the same prompt may be computed as one row.

    Raises:
        LearnerError: a sample is longer than ``max_tokens``.
    """

    def __init__(
        self, batch: TrainBatch, rank: int, num_ranks: int, max_tokens: int, shares_prompts: bool
    ) -> None:
        longest = max(batch.samples, key=len)
        if len(longest) > max_tokens:
            raise LearnerError(
                f"Sample {longest.sample_id!r} has {len(longest)} tokens, but learner.micro_batch_tokens="
                f"{max_tokens} is all that one rank puts through the model at once: raise it to that."
            )
        missing = -len(batch.samples) % num_ranks
        samples = batch.samples + (padding_sample(batch.samples[0].prompt_ids[0]),) * missing
        workload = calculate_workload(torch.tensor([len(sample) for sample in samples])).tolist()
        self.batch = batch
        self._shares_prompts = shares_prompts
        own = get_seqlen_balanced_partitions(workload, num_ranks, equal_size=True)[rank]
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index in own:
            by_prompt.setdefault(samples[index].prompt_ids, []).append(index)
        self.indices = [index for same in by_prompt.values() for index in same]
        self.rows = [samples[index] for index in self.indices]

    def supervised(self) -> TensorDict:
        """Make a batch for ``sft_loss``, whose ``loss_mask`` covers prompt and response."""
        return self._table([(0,) * len(row.prompt_ids) + row.loss_mask for row in self.rows], {})

    def unscored(self) -> TensorDict:
        """Make a batch for a forward pass without a loss."""
        return self._table([row.loss_mask for row in self.rows], {})

    def scored(self, columns: Mapping[str, str]) -> TensorDict:
        """Make a batch for a loss that reads ``columns`` (our name -> verl's), each [R].

        Raises:
            LearnerError: a sample lacks one of them.
        """
        tensors = {theirs: [_column(row, ours) for row in self.rows] for ours, theirs in columns.items()}
        return self._table([row.loss_mask for row in self.rows], tensors)

    def responses(self, outputs: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return what the model put out [P + R] for each row, cut to the response [R], by index in the
        batch."""
        # verl's column i belongs to token i+1: the response's begin one before its first token.
        return {
            index: output[len(row.prompt_ids) - 1 : len(row) - 1].clone()
            for index, row, output in zip(self.indices, self.rows, outputs.unbind(), strict=True)
            if index < len(self.batch.samples)
        }

    def _table(
        self, loss_masks: Sequence[Sequence[int]], columns: Mapping[str, list[torch.Tensor]]
    ) -> TensorDict:
        """Jagged tensors, one row a sample.

        The sum of ``loss_mask`` over all ranks is what token means divide by, ``global_batch_size`` what
        means over sequences do: padding, and what was masked altogether, counts in neither. A trajectory
        counts as one sequence, however many samples it has.
        """
        rows = self.rows
        sizes: Counter[str] = Counter()
        for sample in self.batch.samples:
            sizes[_trajectory(sample)] += sample.num_sampled_tokens
        nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        tensors = {
            "input_ids": [torch.tensor(row.prompt_ids + row.response_ids) for row in rows],
            "position_ids": [torch.arange(len(row)) for row in rows],
            "prompts": [torch.tensor(row.prompt_ids) for row in rows],
            "responses": [torch.tensor(row.response_ids) for row in rows],
            "response_mask": [torch.tensor(row.loss_mask) for row in rows],
            "loss_mask": [torch.tensor(mask) for mask in loss_masks],
            **columns,
        }
        shares = [
            row.num_sampled_tokens / sizes[_trajectory(row)] if row.num_sampled_tokens else 1.0
            for row in rows
        ]
        return tu.get_tensordict(
            {name: nested(column) for name, column in tensors.items()}
            | {TRAJECTORY_SHARE: torch.tensor(shares)},
            non_tensor_dict={
                "temperature": self.batch.temperature,
                SHARES_PROMPTS: self._shares_prompts,
                "global_batch_size": sum(1 for size in sizes.values() if size),
            },
        )


def _trajectory(sample: TrainingSample) -> str:
    return sample.rollout_id or sample.sample_id


def _column(row: TrainingSample, name: str) -> torch.Tensor:
    values: tuple[float, ...] = getattr(row, name)
    if not any(row.loss_mask):  # padding, or all of it was masked: whatever it holds counts nowhere
        return torch.zeros(len(row.response_ids))
    if len(values) != len(row.response_ids):
        raise LearnerError(
            f"Sample {row.sample_id!r} has {len(values)} {name} for {len(row.response_ids)} response tokens: "
            "score and assign_credit come before update."
        )
    return torch.tensor(values)


def as_column(rows: Sequence[torch.Tensor], batch: TrainBatch) -> list[tuple[float, ...]]:
    """``rows``, [R] for each sample, as a column of ``batch``: kept where the mask is 1, and 0 elsewhere."""
    pairs = zip(rows, batch.samples, strict=True)
    return [tuple((row * torch.tensor(sample.loss_mask)).tolist()) for row, sample in pairs]


def sampled(batches: Sequence[TrainBatch], name: str) -> torch.Tensor:
    """Join one column of all samples: [number of sampled tokens]."""
    return torch.cat(
        [
            _column(sample, name)[torch.tensor(sample.loss_mask, dtype=torch.bool)]
            for batch in batches
            for sample in batch.samples
        ]
    )
