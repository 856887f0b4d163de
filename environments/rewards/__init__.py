"""Reward functions: they judge answers."""

from environments.rewards.base import RewardFunction, RewardOutput
from environments.rewards.code.reward import code_reward_fn
from environments.rewards.math import math_reward_fn
from environments.rewards.search import search_reward_fn

__all__ = ["RewardFunction", "RewardOutput", "code_reward_fn", "math_reward_fn", "search_reward_fn"]
