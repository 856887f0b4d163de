"""What vLLM is told: its environment, and its arguments from ``server.engine``. Does not import vLLM."""

from __future__ import annotations

import math
from typing import Any

from environments.errors import ConfigError
from policies.settings import EngineConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: see the head of vllm.py
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = ENVIRONMENT | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a node binds to the same cores
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a C++ compiler
}

OWN_ARGUMENTS = {
    "enable_lora": "server.adapters decides",
    "max_loras": "server.adapters decides",
    "max_lora_rank": "server.adapters decides",
    "logprobs_mode": "the learner needs the log-probabilities of the distribution that was sampled from",
}
"""Arguments of vLLM that Troupe sets itself, and the reason."""


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables that a process needs before it imports vLLM; a value already set wins."""
    if config.num_gpus:
        return ENVIRONMENT
    # More threads than free cores spin: measured, that cost a factor of ten.
    return CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(config.num_threads or 1)}


def check_options(options: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for arguments of vLLM that would break what the learner relies on."""
    for name, reason in OWN_ARGUMENTS.items():
        if name in options:
            raise ConfigError(f"server.engine.options.{name} cannot be set: {reason}.")
    if options.get("async_scheduling"):
        raise ConfigError(
            "server.engine.options.async_scheduling=true would leave a step unfinished whenever weights are "
            "exchanged, and it would be unknown which weights sampled its tokens: leave it out."
        )


def check_gpus(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for GPUs that the engine would reserve and not use, or use and not reserve."""
    parts = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    used = math.prod(config.options.get(part) or 1 for part in parts)
    if config.num_gpus and max(config.num_gpus, 1) != used:
        raise ConfigError(
            f"server.engine.num_gpus={config.num_gpus} with "
            f"server.engine.options.tensor_parallel_size={config.options.get('tensor_parallel_size', 1)}: an "
            f"engine spreads over {used} GPU(s). Set both to the same number, or server.num_replicas for "
            "more engines of one GPU."
        )


def engine_arguments(model_path: str, config: EngineConfig) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``, without ``config.options``, which go over them."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        # Else a step is always in flight when weights are exchanged: see _num_sampled in vllm.py.
        "async_scheduling": False,
        # The distribution that was sampled from, after temperature: what a policy gradient needs.
        "logprobs_mode": "processed_logprobs",
    }
    if config.num_gpus:
        return arguments
    # vLLM 0.29 rewinds a seeded request's generator after a partial prefill by a call that CPU generators
    # do not have, which ends the engine: so here a prompt is never split.
    return arguments | {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, config.max_model_tokens),
    }
