"""Rows of a micro-batch in which several samples share their prompt, so that it is computed once.

The members of a group have the same prompt, often many times as long as their responses. A row then holds the
prompt and after it all responses; each response sees the prompt and itself, at the positions that it would
have alone. The log-probabilities are the same but for rounding.

    one sample a row:     prompt response_1        prompt response_2
    a shared prompt:      prompt response_1 response_2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from transformers import PreTrainedConfig, PreTrainedModel

ROW = "row"
"""Column of a micro-batch: the row of each sample. Samples of a row stand next to each other."""
PAIRS_PER_TOKEN = 384
"""Number of pairs of tokens in the attention that cost at most as much as one token in all the rest of a
model: three times the width of the smallest that is trained here. Wider models would gain from longer rows
too."""
FULL_ATTENTION = "full_attention"


def can_share(module: torch.nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether every layer of the model computes what the attention mask says: none is recurrent, has a
    window, or makes something of its own of the mask.

    The mask is of booleans. torch's attention (sdpa) leaves out what is False; transformers' own (eager)
    would add True and False to the scores, and alibi would count positions by them.

    Args:
        module: the model, which adapters may be wrapped around.
    """
    text = config.get_text_config()  # of a model that reads pictures too
    # Some configurations list the types of their layers, some compute them, and many have neither.
    layers = set(getattr(text, "layer_types", None) or [FULL_ATTENTION])
    has_window = getattr(text, "sliding_window", None) is not None
    if layers != {FULL_ATTENTION} or has_window or getattr(text, "alibi", False):
        return False
    models = (each for each in module.modules() if isinstance(each, PreTrainedModel))
    return all(each.config._attn_implementation == "sdpa" and not each._is_stateful for each in models)


def share_prompts(prompts: Sequence[Sequence[int]], responses: Sequence[int], most: int) -> list[list[int]]:
    """Return which samples make up each row: neighbours with the same prompt, while that saves work.

    Args:
        prompts: token ids of each sample's prompt.
        responses: number of tokens of each sample's response.
        most: tokens of a row with several samples.
    """
    rows: list[list[int]] = []
    shared: list[int] = []  # response tokens of the last row
    for index, (prompt, length) in enumerate(zip(prompts, responses, strict=True)):
        fits = (
            rows
            and tuple(prompts[rows[-1][0]]) == tuple(prompt)
            and len(prompt) + shared[-1] + length <= most
            and shared[-1] * length <= PAIRS_PER_TOKEN * len(prompt)
        )
        if fits:
            rows[-1].append(index)
            shared[-1] += length
        else:
            rows.append([index])
            shared.append(length)
    return rows


@dataclass(frozen=True)
class Layout:
    """A micro-batch as the model's input, and where in its output the responses are predicted.

    Attributes:
        input_ids, positions: [rows, longest row].
        segments: [rows, longest row]: 0 for the prompt, k for a row's k-th response, -1 for padding.
        row_of, column_of: [N] row and column whose logits predict a response token, sample by sample.
        labels: [N] these tokens.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    row_of: torch.Tensor
    column_of: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, micro_batch: TensorDict) -> Layout:
        """The layout of samples in verl's columns. Without a column ``row`` each sample has its own."""
        prompts, responses = micro_batch["prompts"].unbind(), micro_batch["responses"].unbind()
        has_rows = ROW in micro_batch.keys()  # noqa: SIM118  # of a TensorDict
        row_numbers = micro_batch[ROW].tolist() if has_rows else range(len(prompts))
        ids: list[list[torch.Tensor]] = []
        positions: list[list[torch.Tensor]] = []
        segments: list[list[torch.Tensor]] = []
        row_of, column_of = [], []
        device = prompts[0].device
        last_row = None
        for prompt, response, row in zip(prompts, responses, row_numbers, strict=True):
            own = torch.arange(len(response), device=device)
            if row != last_row:
                last_row = row
                ids.append([prompt])
                positions.append([torch.arange(len(prompt), device=device)])
                segments.append([torch.zeros_like(prompt)])
            # The logits that predict a token are those of the token before it. For the first token of a
            # response that is the prompt's last one, and not the end of the response beside it.
            columns = sum(map(len, ids[-1])) - 1 + own
            columns[:1] = len(prompt) - 1
            row_of.append(torch.full_like(own, len(ids) - 1))
            column_of.append(columns)
            segments[-1].append(torch.full_like(response, len(ids[-1])))
            ids[-1].append(response)
            positions[-1].append(len(prompt) + own)
        return cls(
            input_ids=_padded(ids, 0),
            positions=_padded(positions, 0),
            segments=_padded(segments, -1),
            row_of=torch.cat(row_of),
            column_of=torch.cat(column_of),
            labels=torch.cat(responses),
        )

    def attention_mask(self) -> torch.Tensor:
        """Return what each token may see: [rows, longest row], or [rows, 1, query, key] where prompts are
        shared."""
        if int(self.segments.max()) <= 1:
            return self.segments >= 0
        key, query = self.segments.unsqueeze(1), self.segments.unsqueeze(2)
        length = self.segments.shape[1]
        before = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
        # Padding sees the prompt too: a token that sees nothing would be NaN.
        return (before & ((key == 0) | ((key == query) & (key > 0)))).unsqueeze(1)


def _padded(rows: Sequence[Sequence[torch.Tensor]], value: int) -> torch.Tensor:
    joined = [torch.cat(list(parts)) for parts in rows]
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=value)
