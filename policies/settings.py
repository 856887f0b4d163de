"""Settings of the engine and the format of adapters: importable without any engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.bounds import check_bounds, setting
from environments.errors import ConfigError

EXACT_DTYPES = ("float32", "float")
"""Names of the dtype in which engine and learner agree to rounding."""
ADAPTER = "adapter"
"""Subfolder of a checkpoint with the trained adapters, in peft's format."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that every adapter folder in peft's format has."""


def node_labels(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Labels that a node has to have: the words among ``nodes``, a setting such as ``fleet.nodes``."""
    return {name: value for name, value in nodes.items() if isinstance(value, str)}


def node_resources(nodes: Mapping[str, Any]) -> dict[str, float]:
    """Resources that each process reserves on its node: the numbers among ``nodes``."""
    return {name: float(value) for name, value in nodes.items() if not isinstance(value, str)}


def check_nodes(setting: str, nodes: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for what is neither a label nor an amount to reserve."""
    for name, value in nodes.items():
        if isinstance(value, str):
            continue
        if isinstance(value, Mapping):
            raise ConfigError(f"{setting}.{name} has {dict(value)}: set what is in it in {setting} itself.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{setting}={{{name}: {value}}} has to be a label, which is a word, or an amount, which is a "
                f'number: write {setting}={{{name}: "{value}"}} for a label.'
            )
        if value < 0 or (value == 0 and name != "CPU"):
            raise ConfigError(f"{setting}={{{name}: {value}}} reserves nothing: use more than 0.")


@dataclass
class EngineConfig:
    """The engine of a replica. What an engine cannot act on is an error (``Engine.check_config``)."""

    name: str = "vllm"
    """vllm, or "module:Class" of another engine: see policies/engines/README.md."""
    num_gpus: float = setting(0.0, at_least=0)
    """GPUs of an engine; 0 means vLLM's CPU build."""
    max_model_tokens: int = setting(1024, at_least=1)
    """Most tokens of a prompt and its completion together."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine. vLLM's are those of its EngineArgs, which checks them, such as dtype:
    float32 is the default, which agrees with the learner to rounding; bfloat16 is fast on GPUs. And
    num_threads, of an engine on a CPU: without it they are as for learner.num_threads, divided by the
    replicas. And cache_after_publish, for the cached keys and values of unfinished requests when new weights
    arrive. recompute: by the new weights, the default, which is exact. keep: the old values stay, which saves
    a prefill and is slightly more off-policy."""

    @property
    def dtype(self) -> str:
        """The type of the weights, by vLLM's name."""
        return str(self.options.get("dtype", "float32"))

    @property
    def half_dtype(self) -> str | None:
        """The type of the weights, by torch's name, if it is one of two bytes for certain."""
        return {"half": "float16", "float16": "float16", "bfloat16": "bfloat16"}.get(self.dtype)

    @property
    def num_threads(self) -> int | None:
        """The CPU threads of an engine on a CPU, where they are decided."""
        return self.options.get("num_threads")

    def __post_init__(self) -> None:
        check_bounds(self, "server.engine.")


def adapter_config(folder: str | Path) -> dict[str, Any]:
    """The adapter's configuration in peft's format. Raises ``ConfigError`` if it cannot be read."""
    return json_object(Path(folder) / ADAPTER_CONFIG)


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model or an adapter. Raises ``ConfigError`` if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): copy or write it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, and has to hold a JSON object.")
    return content
