"""How answers are judged."""

from environments.rewards.base import RewardFunction, RewardOutput
from environments.rewards.math import math_reward_fn

__all__ = ["RewardFunction", "RewardOutput", "math_reward_fn"]
