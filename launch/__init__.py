"""Configuration, wiring and commands: the front door. Importing this is light, so that ``--help`` is fast."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.config import TrainConfig
    from launch.trainer import AgentTrainer

# Asked for anything after the run has ended, as by a thread that still waits for Serve, Ray would start a new
# cluster, with a whole dashboard, and leave it behind. It reads this when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

__all__ = ["AgentTrainer", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name == "AgentTrainer":
        from launch.trainer import AgentTrainer

        return AgentTrainer
    if name == "TrainConfig":
        from launch.config import TrainConfig

        return TrainConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
