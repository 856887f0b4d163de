"""Settings of the engine and the format of adapters: importable without any engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.bounds import check_bounds, setting
from environments.errors import ConfigError

ADAPTER = "adapter"
"""Subfolder of a checkpoint with the trained adapters, in peft's format."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that every adapter folder in peft's format has."""


@dataclass
class NodesConfig:
    """The nodes of a Ray cluster that processes of one kind live on."""

    labels: dict[str, str] = field(default_factory=dict)
    """Labels that a node has to have, as ``ray start --labels`` sets them: {market: spot}. Ray's forms
    "!spot", "in(spot,reserved)" and "!in(spot,reserved)" are known too."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts that each process reserves of what ``ray start --resources`` gives a node: {big_disk: 1}."""

    def __post_init__(self) -> None:
        for name, amount in self.resources.items():
            if not amount > 0:
                raise ConfigError(f"nodes.resources={{{name}: {amount}}} reserves nothing: use more than 0.")


@dataclass
class EngineConfig:
    """The engine of a replica. What an engine cannot act on is an error (``Engine.check_config``)."""

    name: str = "vllm"
    """vllm, or "module:Class" of another engine: see policies/engines/README.md."""
    num_gpus: float = setting(0.0, at_least=0)
    """GPUs of an engine; 0 means vLLM's CPU build."""
    num_threads: int | None = setting(None, at_least=1)
    """CPU threads of an engine on a CPU. Null is as for learner.num_threads, divided by the replicas."""
    max_model_tokens: int = setting(1024, at_least=1)
    """Most tokens of a prompt and its completion together."""
    dtype: str = "float32"
    """Type of the weights, by vLLM's name. float32 agrees with the learner to rounding; bfloat16 is fast on
    GPUs."""
    cache_after_publish: str = setting("recompute", one_of=("recompute", "keep"))
    """Cached keys and values of unfinished requests when new weights arrive. recompute: by the new weights,
    which is exact. keep: the old values stay, which saves a prefill and is slightly more off-policy."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine: vLLM's are those of its EngineArgs, which checks them."""

    def __post_init__(self) -> None:
        check_bounds(self, "server.engine.")


def adapter_config(folder: str | Path) -> dict[str, Any]:
    """The adapter's configuration in peft's format. Raises ``ConfigError`` if it cannot be read."""
    path = Path(folder) / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): copy or write it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, and has to hold a JSON object.")
    return config
