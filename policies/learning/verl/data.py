"""Training samples in verl's layout, and which rank takes which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from environments.errors import LearnerError
from policies.learning.samples import TrainBatch, TrainingSample, padding_sample
from policies.learning.verl import config as verl_config  # noqa: F401  # before verl: see there
from policies.learning.verl.token_trees import ROW, SHARED, Branch, Row, halves, num_tokens, plan_rows

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
IMBALANCE = 1.05
"""The rank with the most work may have this many times the mean of all."""
TRAJECTORY_SHARE = "trajectory_share"
"""Column of a micro-batch [N]: the part that a sample has of its trajectory's sampled tokens. It is 1 but
where a trajectory has several samples, since its history was rewritten."""


class RankShard:
    """A rank's rows of a batch.

    A row is a sample, or a tree of several. The batch is filled up with padding rows until every rank has
    equally many; then the ranks' work is made as equal as it gets. All ranks come to the same partition.
    Rows with the same prompt stand next to each other; but for that a rank's order is the batch's.

    Args:
        max_tokens: most tokens that fit through the model at once.
        pairs_per_token: that ``token_trees.pairs_per_token`` returns.

    Raises:
        LearnerError: a sample is longer than ``max_tokens``.
    """

    def __init__(
        self, batch: TrainBatch, rank: int, num_ranks: int, max_tokens: int, pairs_per_token: int
    ) -> None:
        longest = max(batch.samples, key=len)
        if len(longest) > max_tokens:
            raise LearnerError(
                f"Sample {longest.sample_id!r} has {len(longest)} tokens, but learner.micro_batch_tokens="
                f"{max_tokens} is all that one rank puts through the model at once: raise it to that."
            )
        samples = (*batch.samples, padding_sample(batch.samples[0].prompt_ids[0]))
        rows = plan_rows(
            [sample.prompt_ids + sample.response_ids for sample in batch.samples], max_tokens, pairs_per_token
        )
        padding = Branch(len(batch.samples), 0, len(samples[-1]))
        by_prompt: dict[tuple[int, ...], list[Row]] = {}
        for row in divide_among_ranks(rows, num_ranks, padding)[rank]:
            by_prompt.setdefault(samples[row[0].sample].prompt_ids, []).append(row)
        self.batch = batch
        self._rows = list(chain(*by_prompt.values()))
        self.indices = [branch.sample for row in self._rows for branch in row]
        self.samples = [samples[index] for index in self.indices]

    def supervised(self) -> TensorDict:
        """Make a batch for ``sft_loss``, whose ``loss_mask`` covers prompt and response."""
        return self._table([(0,) * len(sample.prompt_ids) + sample.loss_mask for sample in self.samples], {})

    def unscored(self) -> TensorDict:
        """Make a batch for a forward pass without a loss."""
        return self._table([sample.loss_mask for sample in self.samples], {})

    def scored(self, columns: Mapping[str, str]) -> TensorDict:
        """Make a batch for a loss that reads ``columns`` (our name -> verl's), each [R].

        Raises:
            LearnerError: a sample lacks one of them.
        """
        tensors = {
            theirs: [_column(sample, ours) for sample in self.samples] for ours, theirs in columns.items()
        }
        return self._table([sample.loss_mask for sample in self.samples], tensors)

    def responses(self, outputs: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return what the model put out [P + R] for each row, cut to the response [R], by index in the
        batch."""
        # verl's column i belongs to token i+1: the response's begin one before its first token.
        return {
            index: output[len(sample.prompt_ids) - 1 : len(sample) - 1].clone()
            for index, sample, output in zip(self.indices, self.samples, outputs.unbind(), strict=True)
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
        samples = self.samples
        sizes: Counter[str] = Counter()
        for sample in self.batch.samples:
            sizes[_trajectory(sample)] += sample.num_sampled_tokens
        nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        tensors = {
            "input_ids": [torch.tensor(sample.prompt_ids + sample.response_ids) for sample in samples],
            "position_ids": [torch.arange(len(sample)) for sample in samples],
            "prompts": [torch.tensor(sample.prompt_ids) for sample in samples],
            "responses": [torch.tensor(sample.response_ids) for sample in samples],
            "response_mask": [torch.tensor(sample.loss_mask) for sample in samples],
            "loss_mask": [torch.tensor(mask) for mask in loss_masks],
            **columns,
        }
        shares = [
            sample.num_sampled_tokens / sizes[_trajectory(sample)] if sample.num_sampled_tokens else 1.0
            for sample in samples
        ]
        return tu.get_tensordict(
            {name: nested(column) for name, column in tensors.items()}
            | {
                TRAJECTORY_SHARE: torch.tensor(shares),
                ROW: torch.tensor([number for number, row in enumerate(self._rows) for _ in row]),
                SHARED: torch.tensor([branch.shared for row in self._rows for branch in row]),
            },
            non_tensor_dict={
                "temperature": self.batch.temperature,
                "global_batch_size": sum(1 for size in sizes.values() if size),
            },
        )


def divide_among_ranks(rows: Sequence[Row], num_ranks: int, padding: Branch) -> list[list[Row]]:
    """The rows of each rank, as many as every other's with those of ``padding``.

    As long as the rank with the most work has more than ``IMBALANCE`` times the mean, its largest tree is
    halved, if that leaves less to the slowest ones: what the halves have in common is computed on two ranks.
    """
    parts = _partition(rows, num_ranks, padding)
    while trees := _trees_that_delay(parts):
        largest = max(trees, key=num_tokens)
        rows = list(chain(*(halves(row) if row is largest else (row,) for row in rows)))
        halved = _partition(rows, num_ranks, padding)
        if _slowest_first(halved) >= _slowest_first(parts):
            break
        parts = halved
    return parts


def _partition(rows: Sequence[Row], num_ranks: int, padding: Branch) -> list[list[Row]]:
    filled = [*rows, *([[padding]] * (-len(rows) % num_ranks))]
    work = [_work([row]) for row in filled]
    parts = get_seqlen_balanced_partitions(work, num_ranks, equal_size=True)
    return [[filled[index] for index in part] for part in parts]


def _work(rows: Sequence[Row]) -> int:
    return int(calculate_workload(torch.tensor([num_tokens(row) for row in rows])).sum())


def _slowest_first(parts: Sequence[Sequence[Row]]) -> list[int]:
    return sorted(map(_work, parts), reverse=True)


def _trees_that_delay(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the trees of the part with the most work, if the others wait for it."""
    work = list(map(_work, parts))
    slowest = max(range(len(parts)), key=lambda index: work[index])
    waits = work[slowest] * len(parts) > IMBALANCE * sum(work)
    return [row for row in parts[slowest] if len(row) > 1 and waits]


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
    samples = [sample for batch in batches for sample in batch.samples]
    return torch.cat([_column(each, name)[torch.tensor(each.loss_mask).bool()] for each in samples])
