"""Settings of the engine: a plain dataclass, importable without vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.bounds import check_bounds, setting
from environments.errors import ConfigError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: see the head of engine.py
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = ENVIRONMENT | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a node binds to the same cores
    "OMP_NUM_THREADS": "1",  # measured: more threads than free cores spin and cost a factor of ten
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a C++ compiler
}


ADAPTER = "adapter"
"""Subfolder of a checkpoint with the trained adapters, in peft's format."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that every adapter folder in peft's format has."""

OWN_ARGUMENTS = {
    "enable_lora": "server.adapters decides",
    "max_loras": "server.adapters decides",
    "max_lora_rank": "server.adapters decides",
    "logprobs_mode": "the learner needs the log-probabilities of the distribution that was sampled from",
}
"""Arguments of vLLM that Troupe sets itself, and the reason."""


@dataclass
class EngineConfig:
    """How vLLM is started."""

    num_gpus: float = setting(0.0, at_least=0)
    """GPUs of an engine; 0 means vLLM's CPU build."""
    max_model_tokens: int = setting(1024, at_least=1)
    """Most tokens of a prompt and its completion together."""
    dtype: str = "float32"
    """Type of the weights, by vLLM's name. float32 agrees with the learner to rounding; bfloat16 is fast on
    GPUs."""
    cache_after_publish: str = setting("recompute", one_of=("recompute", "keep"))
    """Cached keys and values of unfinished requests when new weights arrive. recompute: by the new weights,
    which is exact. keep: the old values stay, which saves a prefill and is slightly more off-policy."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, which checks them."""

    def __post_init__(self) -> None:
        check_bounds(self, "server.engine.")
        for name, reason in OWN_ARGUMENTS.items():
            if name in self.vllm:
                raise ConfigError(f"server.engine.vllm.{name} cannot be set: {reason}.")
        if self.vllm.get("async_scheduling"):
            raise ConfigError(
                "server.engine.vllm.async_scheduling=true would leave a step unfinished whenever weights are "
                "exchanged, and it would be unknown which weights sampled its tokens: leave it out."
            )


def adapter_config(folder: str | Path) -> dict[str, Any]:
    """The adapter's configuration in peft's format."""
    config: dict[str, Any] = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return config


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables that a process needs before it imports vLLM; a value already set wins."""
    return ENVIRONMENT if config.num_gpus else CPU_ENVIRONMENT
