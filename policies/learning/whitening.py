"""Corrects verl's whitening of advantages, for ``credit``: its statistics are those of the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from policies.learning.samples import ALIKE

if TYPE_CHECKING:
    import torch

EPSILON = 1e-8
"""Number that verl adds to a variance."""


def over_trained_tokens(
    advantages: torch.Tensor, raw: torch.Tensor, mask: torch.Tensor, trained: Sequence[bool]
) -> torch.Tensor:
    """The whitened ``advantages`` with mean 0 and variance 1 over the rows that are ``trained``.

    verl whitens over all rows that an estimator is given. Members that only count in the baseline of their
    group, such as long ones that are left out, would decide the scale of what is learned.

    Where all are trained, ``advantages`` are returned as they are. Where ``raw`` is the same at all trained
    tokens, there is nothing to learn, and they are 0: verl's float32 mean of ten times 1000.1 is another
    number, and the difference would be divided by a deviation of nearly nothing.

    Args:
        advantages: [N, T] of verl, whitened over all tokens.
        raw: [N, T] before the whitening, or whitened too.
        mask: [N, T] 1 where a row has a token.
        trained: [N], of which at least one is.
    """
    of_trained = mask.bool() & mask.new_tensor(trained).bool().unsqueeze(-1)
    values = raw[of_trained]
    if values.max() - values.min() <= ALIKE * values.abs().max().clamp(min=1):
        return advantages.new_zeros(advantages.shape)
    if all(trained):
        return advantages
    exact = advantages.double()
    values = exact[of_trained]
    return (exact - values.mean()) / (values.var() + EPSILON).sqrt() * mask
