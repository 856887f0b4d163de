"""An engine that notes the GPUs that its process sees, and computes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ray
from scripted_engine import ScriptedEngine

from policies.settings import EngineConfig


class PretendedEngine(ScriptedEngine):
    """Writes what it sees beside the model, under the number of its process."""

    def __init__(self, model_path: str, config: EngineConfig, adapters: Mapping[str, str]) -> None:
        super().__init__(model_path, replace(config, options={"replies": ["Here."]}), adapters)
        Path(model_path, f"{os.getpid()}.devices").write_text(json.dumps(devices()))

    async def sleep(self) -> None:
        """There is nothing to free."""

    async def wake(self) -> None:
        """There is nothing to fetch."""


def devices() -> tuple[str, list[str]]:
    """This process's node, and the GPUs that CUDA would show it there."""
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
