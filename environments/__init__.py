"""Environments, their tasks, tools and rewards. Importing this needs nothing but the standard library."""

from environments.base import ActorNeeds, BaseEnv, MultiTurnEnvironment, SingleTurnEnvironment
from environments.check import check_environment
from environments.code_environment import CodeEnvironment
from environments.data.datasets import Dataset, DatasetRegistry
from environments.data.trajectory_file import read_trajectories
from environments.errors import ConfigError, TroupeError
from environments.pass_at_k import compute_pass_at_k
from environments.rewards import RewardOutput, code_reward_fn, math_reward_fn, search_reward_fn
from environments.tool_environment import MCPEnvironment, ToolEnvironment
from environments.tools import MCPServer
from environments.types import Action, Completion, Step, TerminationReason, Trajectory, TrajectoryGroup

__all__ = [
    "Action",
    "ActorNeeds",
    "BaseEnv",
    "CodeEnvironment",
    "Completion",
    "ConfigError",
    "Dataset",
    "DatasetRegistry",
    "MCPEnvironment",
    "MCPServer",
    "MultiTurnEnvironment",
    "RewardOutput",
    "SingleTurnEnvironment",
    "Step",
    "TerminationReason",
    "ToolEnvironment",
    "Trajectory",
    "TrajectoryGroup",
    "TroupeError",
    "check_environment",
    "code_reward_fn",
    "compute_pass_at_k",
    "math_reward_fn",
    "read_trajectories",
    "search_reward_fn",
]
