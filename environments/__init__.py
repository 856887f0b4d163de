"""What is asked and how it is judged. Importing this needs nothing but the standard library."""

from environments.base import BaseEnv, MultiTurnEnvironment, SingleTurnEnvironment
from environments.datasets import Dataset, DatasetRegistry
from environments.errors import ConfigError, TroupeError
from environments.pass_at_k import compute_pass_at_k
from environments.rewards import RewardOutput, math_reward_fn
from environments.tool_environment import ToolEnvironment
from environments.types import Action, Completion, Step, TerminationReason, Trajectory, TrajectoryGroup

__all__ = [
    "Action",
    "BaseEnv",
    "Completion",
    "ConfigError",
    "Dataset",
    "DatasetRegistry",
    "MultiTurnEnvironment",
    "RewardOutput",
    "SingleTurnEnvironment",
    "Step",
    "TerminationReason",
    "ToolEnvironment",
    "Trajectory",
    "TrajectoryGroup",
    "TroupeError",
    "compute_pass_at_k",
    "math_reward_fn",
]
