"""An algorithm of a user's own, with a setting of its estimator and one of its loss: ``algorithm.module``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from environments.bounds import setting
from policies.learning.algorithms import register_algorithm
from policies.learning.registry import Definition, register_estimator, register_loss

if TYPE_CHECKING:
    import torch


@dataclass
class RewardOptions:
    """Of ``scaled_reward``."""

    factor: float = setting(2.0, above=0)
    """The advantage is so many times the reward."""


@register_estimator("scaled_reward", discounts=True, options=RewardOptions)
def scaled_reward(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = gamma * factor * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


@dataclass
class RatioOptions:
    """Of ``ratio_to_a_power``."""

    power: float = 1.0
    """Of the ratio."""


@register_loss("ratio_to_a_power", options=RatioOptions)
def ratio_to_a_power(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    power: float,
    **others: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    from verl.trainer.ppo.core_algos import agg_loss  # here: a configuration is checked without verl

    losses = -advantages * (power * (log_prob - old_log_prob)).exp()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


register_algorithm("own", Definition(advantage="scaled_reward", loss="ratio_to_a_power"))
