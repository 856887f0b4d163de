"""An advantage estimator and a policy loss of a user's own: what ``algorithm.module`` names."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("twice_the_reward")
def twice_the_reward(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, config: Any, **ignored: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = config.gamma * 2 * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


@register_policy_loss("unclipped")
def unclipped(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    **ignored: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    losses = -advantages * (log_prob - old_log_prob).exp()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
