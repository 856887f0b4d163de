"""The policy loss: verl's, by name, our KL term, and exact metrics of the ratio of new to old policy."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from policies.learning.correction import importance_weights
from policies.learning.kl import kl_estimate
from policies.learning.verl import config as verl_config  # noqa: F401  # before verl: see there
from policies.learning.verl.data import TRAJECTORY_SHARE

# isort: split
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    register_policy_loss,
)
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

if TYPE_CHECKING:
    from policies.learning.algorithm import Algorithm

CLIPPING = ("vanilla", "gspo", "cispo", "geo_mean")
"""Losses that clip the ratio. The others have no clip fraction."""
MEAN_OF_MEANS = "seq-mean-token-mean"
"""The aggregation in which every trajectory counts equally, by the mean of its tokens."""


def policy_loss(
    algorithm: Algorithm,
    config: ActorConfig,
    model_output: dict[str, torch.Tensor],
    data: TensorDict,
    dp_group: Any = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` of one micro-batch, and the KL penalty where it belongs to the loss.

    Gradients add up to the batch's over micro-batches and ranks, whichever way the batch is cut. Metrics are
    means over the sampled tokens of the whole batch.

    A mean over sequences is one over trajectories: where a history was rewritten, all samples of the
    trajectory count as one sequence together. Only the ratio that gspo and geo_mean have for a sequence is
    each sample's own, since a sample is a context. A mean over a trajectory's tokens is made by weighting
    each sample by its share of them; the losses are proportional to the advantage.

    Args:
        data: without ``old_log_probs`` where the model is still the one that it would be scored with: they
            are its own then, detached.
    """
    data = data.copy()
    if "old_log_probs" not in data.keys():  # noqa: SIM118  # a TensorDict is no dict
        data["old_log_probs"] = _jagged(no_padding_2_padding(model_output["log_probs"].detach(), data), data)
    weight_metrics: dict[str, Metric] = {}
    if algorithm.correction_level is not None:
        most = algorithm.truncate_above or math.inf
        weights, weight_metrics = _truncated_weights(data, algorithm.correction_level, most)
        data["rollout_is_weights"] = _jagged(weights, data)
    if config.loss_agg_mode == MEAN_OF_MEANS:
        data["advantages"] = _scaled(data["advantages"], data[TRAJECTORY_SHARE])
        if "entropy" in model_output:
            entropy = _scaled(model_output["entropy"], data[TRAJECTORY_SHARE])
            model_output = model_output | {"entropy": entropy}
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if algorithm.kl_place == "loss":
        kl = _kl_term(algorithm, config, model_output["log_probs"], data)
        loss = loss + algorithm.kl_coef * kl
        metrics["kl_loss"] = Metric(AggregationType.SUM, kl.detach())
    with torch.no_grad():
        return loss, metrics | weight_metrics | _ratio_metrics(config, model_output["log_probs"], data)


def weighted_loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The sum of -advantage * log-probability over the sampled tokens of one micro-batch.

    Advantages that are minus the derivatives of a loss by the log-probabilities make its gradient the loss's,
    whatever that loss compares: so samples that are compared need not meet in a micro-batch, or on a rank.
    """
    padded = data.select("response_mask", "advantages").to_padded_tensor()
    weighted = padded["advantages"] * no_padding_2_padding(model_output["log_probs"], data)
    # Ranks average their gradients.
    return -torch.where(padded["response_mask"].bool(), weighted, 0.0).sum() * data["dp_size"], {}


def _truncated_weights(data: TensorDict, level: str, most: float) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The importance weights [N, T] of a micro-batch, cut to ``most``, and how large they are.

    They are made here, not before the update: here the old log-probabilities of the first mini-batch are
    known without a forward pass of their own.

    Source: Ionides 2008 (Truncated Importance Sampling); per token in Yao et al. 2025.
    """
    padded = data.select("response_mask", "old_log_probs", "rollout_log_probs").to_padded_tensor()
    mask, log_ratio = padded["response_mask"].bool(), padded["old_log_probs"] - padded["rollout_log_probs"]
    untouched = importance_weights(log_ratio, mask, level)
    weights = untouched.clamp(max=most)
    mean = partial(share_of_mean, mask=mask, data=data)
    return weights, {
        "weight_mean": mean(untouched),
        "weight_max": Metric(AggregationType.MAX, untouched.max()),
        "weight_truncated_fraction": mean(weights < untouched),
        "weight_used_mean": mean(weights),
        "weight_used_square": mean(weights.square()),
        "corrected_diff_mean": mean(torch.where(mask, untouched / weights, 1.0).log()),
    }


def share_of_mean(values: torch.Tensor, mask: torch.Tensor, data: TensorDict) -> Metric:
    """A micro-batch's share of the mean over the trained tokens of the whole batch."""
    scale = data["dp_size"] / data["batch_num_tokens"]
    return Metric(AggregationType.SUM, (values * mask).sum(dtype=torch.float64) * scale)


def _scaled(column: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A jagged column of N rows, each times its factor [N]."""
    rows = zip(column.unbind(), factors, strict=True)
    return torch.nested.as_nested_tensor([row * factor for row, factor in rows], layout=torch.jagged)


def _jagged(padded: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """A column [N, T] of the responses without its padding, as ``data`` holds its columns."""
    rows = zip(padded, data["responses"].offsets().diff(), strict=True)
    return torch.nested.as_nested_tensor([row[:length] for row, length in rows], layout=torch.jagged)


def _kl_term(
    algorithm: Algorithm, config: ActorConfig, log_probs: torch.Tensor, data: TensorDict
) -> torch.Tensor:
    """The micro-batch's share of the KL to the reference policy, aggregated as the policy loss is."""
    padded = data.select("response_mask", "ref_log_prob").to_padded_tensor()
    mask = padded["response_mask"].bool()
    # What is padding, or was said by the environment, could overflow: its gap is set to 0.
    gap = torch.where(mask, no_padding_2_padding(log_probs, data) - padded["ref_log_prob"], 0.0)
    estimate = kl_estimate(gap, torch.zeros_like(gap), algorithm.kl_estimator)
    if config.loss_agg_mode == MEAN_OF_MEANS:
        estimate = estimate * data[TRAJECTORY_SHARE].unsqueeze(-1)
    return agg_loss(estimate, mask, config.loss_agg_mode, **config.global_batch_info)


def _ratio_metrics(config: ActorConfig, log_probs: torch.Tensor, data: TensorDict) -> dict[str, Metric]:
    """Distances of the new policy from the old one and the engine's, and the share of clipped tokens."""
    padded = data.select(
        "response_mask", "old_log_probs", "rollout_log_probs", "advantages"
    ).to_padded_tensor()
    mask, advantages = padded["response_mask"].bool(), padded["advantages"]
    new = no_padding_2_padding(log_probs, data)
    log_ratio = (new - padded["old_log_probs"]) * mask
    gap = (new - padded["rollout_log_probs"]) * mask
    ratio = log_ratio.exp()
    mean = partial(share_of_mean, mask=mask, data=data)

    def largest(values: torch.Tensor) -> Metric:
        return Metric(AggregationType.MAX, torch.where(mask, values, 0.0).max())

    metrics = {
        "kl": mean(-log_ratio),
        "ratio_mean": mean(ratio),
        "ratio_max": largest(ratio),
        "surprise": mean(-new),
        "rollout_kl": mean(-gap),
        "rollout_k3_kl": mean(gap.exp() - 1 - gap),
        "rollout_diff_mean": mean(gap.abs()),
        "rollout_diff_max": largest(gap.abs()),
    }
    loss = config.policy_loss.loss_mode
    if loss in CLIPPING:
        low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
        if loss == "geo_mean":  # the range is that of the logarithm
            low, high = math.exp(-config.clip_ratio_low), math.exp(config.clip_ratio_high)
        if loss == "gspo":  # one ratio per sequence: Zheng et al. 2025, equation 7
            ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        whatever_the_sign = loss == "cispo"
        below = (ratio < low) & ((advantages < 0) | whatever_the_sign)
        above = (ratio > high) & ((advantages > 0) | whatever_the_sign)
        clipped = below | above
        metrics["clip_fraction_low"] = mean(below)
        metrics["clip_fraction_high"] = mean(above)
        if loss == "vanilla":  # the dual clip of Ye et al. 2020 (arXiv 1912.09729), section 4.3
            beyond = (ratio > config.clip_ratio_c) & (advantages < 0)
            clipped |= beyond
            metrics["clip_fraction_dual"] = mean(beyond)
        metrics["clip_fraction"] = mean(clipped)
    return metrics


register_policy_loss("reinforce")(compute_policy_loss_gpg)


@register_policy_loss("geo_mean")
def _geo_mean(
    *, response_mask: torch.Tensor, config: ActorConfig, **arguments: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """GMPO. verl takes the mean over a micro-batch's rows, padding included; here it is the batch's."""
    loss, metrics = compute_policy_loss_geo_mean(response_mask=response_mask, config=config, **arguments)
    batch = config.global_batch_info
    return loss * len(response_mask) * batch["dp_size"] / batch["global_batch_size"], metrics
