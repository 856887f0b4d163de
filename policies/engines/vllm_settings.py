"""Settings of vLLM: its environment, and its arguments from ``server.engine``. Does not import vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from environments.bounds import Bound, check_bounds, setting
from environments.errors import ConfigError
from policies.pictures import reads_pictures
from policies.settings import EXACT_DTYPES, EngineConfig, json_object

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: see the head of vllm.py
    # Else vLLM closes the handlers of Serve's logger: it writes nothing then, and keeps all that it is given.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = ENVIRONMENT | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a node binds to the same cores
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a C++ compiler
}

MAX_SEQUENCES = 256
"""Requests in a step of the engine, unless its options say another number."""
MAX_CACHE_BYTES = 1 << 30
"""Memory of the keys and values on a CPU, unless VLLM_CPU_KVCACHE_SPACE is in the environment (in GiB)."""
CPU_BLOCK_TOKENS = 128
"""Tokens of a block of keys and values, unless the options say another number."""

OWN_ARGUMENTS = dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "server.adapters decides") | {
    "logprobs_mode": "the learner needs the log-probabilities of the distribution that was sampled from",
}
"""Arguments of vLLM that Troupe sets itself, and the reason."""


@dataclass
class OwnOptions:
    """Options that vLLM has not, which say what ``vllm.py`` does with it, and one that the learner reads."""

    dtype: str = setting("float32", one_of=("auto", "bfloat16", "half", "float16", "float", "float32"))
    num_threads: int | None = setting(None, at_least=1)
    cache_after_publish: str = setting("recompute", one_of=("recompute", "keep"))


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: options[each.name] for each in fields(OwnOptions) if each.name in options}


def without_own(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are arguments of vLLM's."""
    return {name: value for name, value in options.items() if name not in _own(options)}


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables that a process needs before it imports vLLM; a value already set wins."""
    if config.num_gpus:
        return ENVIRONMENT
    # More threads than free cores spin: measured, that cost a factor of ten.
    return CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(config.num_threads or 1)}


def check_options(options: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for arguments of vLLM that would break what the learner relies on."""
    check_bounds(OwnOptions(**_own(options)), "server.engine.options.")
    for name, reason in OWN_ARGUMENTS.items():
        if name in options:
            raise ConfigError(f"server.engine.options.{name} cannot be set: {reason}.")
    if options.get("async_scheduling"):
        raise ConfigError(
            "server.engine.options.async_scheduling=true hides which weights sample a token: leave it out."
        )


def check_gpus(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for GPUs that the engine would reserve and not use, or use and not reserve."""
    parts = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    used = math.prod(config.options.get(part) or 1 for part in parts)
    if config.num_gpus and max(config.num_gpus, 1) != used:
        raise ConfigError(
            f"server.engine.num_gpus={config.num_gpus} with server.engine.options.tensor_parallel_size="
            f"{config.options.get('tensor_parallel_size', 1)}: an engine spreads over {used} GPU(s). Set "
            "both to the same number, or server.num_replicas for more engines of one GPU."
        )


def check_step(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for a step that holds too few tokens: one of each request, and unless prompts are
    split a whole one.
    """
    options, setting = config.options, "server.engine.options.max_num_batched_tokens"
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        Bound(at_least=1).check_value(f"server.engine.options.{name}", options.get(name))
    needed = {"server.engine.options.max_num_seqs": options.get("max_num_seqs") or MAX_SEQUENCES}
    if not options.get("enable_chunked_prefill", config.num_gpus):
        needed["server.engine.max_model_tokens"] = config.max_model_tokens
    for name, least in needed.items():
        if (given := options.get("max_num_batched_tokens")) and given < least:
            raise ConfigError(
                f"{setting}={given} is below {name}={least}: raise it to that, or leave it out."
            )


def cache_bytes(shape: Mapping[str, Any], config: EngineConfig) -> int:
    """Bytes for keys and values on a CPU, which vLLM fills with zeros: for as many requests as a step has,
    each at its full length. ``MAX_CACHE_BYTES`` is the most, and for a model whose shape is not known here.

    Args:
        shape: the model's ``config.json``.
    """
    try:
        per_token = token_bytes(shape, config)
    except (LookupError, TypeError, ValueError):
        return MAX_CACHE_BYTES
    block = config.options.get("block_size") or CPU_BLOCK_TOKENS
    tokens = block * math.ceil(config.max_model_tokens / block)
    num_sequences = config.options.get("max_num_seqs") or MAX_SEQUENCES
    return min(MAX_CACHE_BYTES, (num_sequences + 1) * tokens * per_token)  # vLLM keeps a block for itself


def token_bytes(shape: Mapping[str, Any], config: EngineConfig) -> int:
    """Bytes of a token's keys and values in a decoder of the usual shape, or with latent attention;
    ``LookupError`` for any other.
    """
    size = 4 if config.dtype in EXACT_DTYPES else 2
    if "kv_lora_rank" in shape:
        return int(shape["num_hidden_layers"] * (shape["kv_lora_rank"] + shape["qk_rope_head_dim"])) * size
    num_heads = shape["num_attention_heads"]
    head = shape.get("head_dim") or shape["hidden_size"] // num_heads
    numbers = shape["num_hidden_layers"] * shape.get("num_key_value_heads", num_heads) * head
    return 2 * int(numbers) * size


def _shape(folder: Path) -> Mapping[str, Any]:
    """``config.json``; of a model that reads pictures too, the part for text."""
    try:
        shape = json_object(folder / "config.json")
    except ConfigError:
        return {}
    return shape.get("text_config") or shape


def engine_arguments(model_path: str, config: EngineConfig) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``, without ``config.options``, which go over them."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": MAX_SEQUENCES,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "language_model_only": not reads_pictures(model_path),
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
        "kv_cache_memory_bytes": cache_bytes(_shape(Path(model_path)), config),
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, config.max_model_tokens),
    }
