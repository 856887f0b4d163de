"""Correction for tokens that were sampled by other weights, or by other arithmetic, than the learner's."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError
from policies.learning.samples import TrainingSample
from policies.learning.settings import CorrectionConfig

if TYPE_CHECKING:
    import torch

    from policies.learning.algorithm import Algorithm


USUAL_TRUNCATION = 2.0
"""Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL training)."""
LARGEST_LOG_WEIGHT = 20.0
"""A weight stays finite, and above 0, however far the policies are apart; verl has the same bound."""


def importance_weights(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """The learner's probability over the engine's, of a token or of all that a sample has sampled.

    Args:
        log_ratio: [N, T] the learner's log-probabilities less the engine's; any number where the mask is 0.
        mask: [N, T] True on the tokens that are trained.
        level: ``token`` or ``sequence``.

    Returns:
        [N, T], 0 where the mask is 0.

    Source: importance sampling as in verl's ``compute_rollout_correction_weights``, which is not called
    since it rejects a micro-batch that has only padding.
    """
    log_ratio = log_ratio.masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT).exp() * mask


def without_far_tokens(
    samples: Sequence[TrainingSample], algorithm: Algorithm
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples without the tokens whose importance weight is out of the bounds; and how many those are.

    They leave ``loss_mask``: they are not in the loss and not in what it is divided by either, for the mean
    over what is trained must not become smaller because something else is not. A sample may come back with
    an empty mask.

    Source: masked importance sampling as in verl's ``rollout_corr_helper``; per token it is IcePop.
    """
    if not algorithm.masks_far_tokens or not samples:
        return list(samples), {}
    from policies.learning.credit_units import on_tokens, padded  # commands have no use for numpy

    old, engine, mask = (
        padded([on_tokens([sample], name) for sample in samples])
        for name in ("old_logprobs", "rollout_logprobs", "loss_mask")
    )
    sampled, trained = mask.bool(), _kept(old - engine, mask, algorithm).bool()
    result = [
        sample if keep[bits].all() else sample.without_tokens((~keep[bits]).tolist())
        for sample, keep, bits in zip(samples, trained, sampled, strict=True)
    ]
    return result, {"learn/weight_masked_fraction": float((~trained)[sampled].float().mean())}


def _kept(log_ratio: torch.Tensor, mask: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    """The mask [N, T] without what lies outside of the bounds."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    # verl's bounds are those of engine over learner, the other way round, and have to be positive.
    low = 1 / algorithm.mask_above if algorithm.mask_above else sys.float_info.min
    high = 1 / algorithm.mask_below if algorithm.mask_below else sys.float_info.max
    kept, _ = compute_rollout_rejection_mask(
        log_ratio=log_ratio,
        response_mask=mask,
        rollout_rs="token_k1" if algorithm.correction_level == "token" else "seq_sum_k1",
        rollout_rs_threshold=f"{low}_{high}",
    )
    return kept


def resolve_correction(config: CorrectionConfig, differs: bool) -> dict[str, Any]:
    """The fields of ``Algorithm`` that say how it corrects.

    Args:
        differs: other weights, or a coarser arithmetic, than the learner's in float32 sample tokens.

    Raises:
        ConfigError: an unknown name, a setting without effect, or a combination that makes no sense.
    """
    chosen = config.level or ("token" if differs else "none")
    level = None if chosen in ("none", "bypass") else chosen
    truncate_above = config.truncate_above
    mask_below, mask_above = config.mask_outside or (None, None)
    _check_bounds(config, level)
    if level and truncate_above is None and mask_above is None:
        truncate_above = USUAL_TRUNCATION  # a few large weights would rule the update
    return {
        "bypass": config.level == "bypass",
        "correction_level": level,
        "truncate_above": truncate_above,
        "mask_below": mask_below,
        "mask_above": mask_above,
    }


def _check_bounds(config: CorrectionConfig, level: str | None) -> None:
    for setting in ("truncate_above", "mask_outside"):
        value = vars(config)[setting]
        if level is None and value is not None:
            why = ", where every weight would be 1" if config.level == "bypass" else ""
            raise ConfigError(
                f"algorithm.correction.{setting}={value} has no effect with algorithm.correction.level="
                f"{config.level or 'null'}{why}: set it to token or sequence, or leave the other one out."
            )
    low, high = config.mask_outside or (None, None)
    if (low or 0.0) > 1 or (high or math.inf) < 1:
        raise ConfigError(
            f"algorithm.correction.mask_outside={config.mask_outside} would leave out a weight of 1, as of a "
            "token on which the policies agree: the lower bound is at most 1, and the upper at least 1."
        )
    if (config.truncate_above or 0.0) >= (high or math.inf):
        raise ConfigError(
            f"algorithm.correction.truncate_above={config.truncate_above} has no effect with algorithm."
            f"correction.mask_outside={config.mask_outside}, which leaves larger ones out: leave one out."
        )
