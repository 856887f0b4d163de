"""Configuration, wiring and commands: the front door. Importing this is light, so that ``--help`` is fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.config import TrainConfig
    from launch.trainer import AgentTrainer

__all__ = ["AgentTrainer", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name == "AgentTrainer":
        from launch.trainer import AgentTrainer

        return AgentTrainer
    if name == "TrainConfig":
        from launch.config import TrainConfig

        return TrainConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
