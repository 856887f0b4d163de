"""Configuration, wiring and commands: the front door. Importing this is light, so that ``--help`` is fast."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from launch.folder_names import name_clash

if TYPE_CHECKING:
    from launch.config import TrainConfig
    from launch.trainer import AgentTrainer

if clash := name_clash():
    if os.path.basename(sys.argv[0]) not in ("-m", "troupe"):  # a program of the user's
        raise ImportError(clash)
    sys.stderr.write(f"{clash}\n")
    sys.exit(2)

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
