"""Memory that a run on this machine's CPUs will need at its peak, and where, before it starts.

The formula was fitted to runs of SmolLM2-135M on x86-64: see ``tests/unit/launch/test_memory.py``. It knows
decoder models of the usual shape; of another model it says nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from launch.run_folder.model_paths import model_folder
from launch.settings.tree import TrainConfig, algorithm_of
from launch.validation.resources import most_replicas, num_rollout_actors
from policies.engines.vllm_settings import MAX_SEQUENCES, cache_bytes

GB = 1e9
FLOAT = 4
"""Bytes of a number: on CPUs learner and engine compute in float32."""
LEARNER_PROCESS = 1.2 * GB
"""A rank without its model: Python, torch and verl."""
ENGINE_PROCESS = 1.6 * GB
"""A replica without its model: Python, torch, vLLM and Serve."""
PAIR = 0.065 * GB
"""A rollout actor."""
REST = 1.5 * GB
"""Ray, Serve's controller and proxy, the driver, the fleet, the sampler and the weight store."""


def memory_notice(config: TrainConfig, model_path: str) -> str | None:
    """A sentence if the run will need more memory than this machine has free; else ``None``.

    Only for a run on CPUs that starts its own Ray: on a cluster its parts lie on several machines.
    """
    if os.environ.get("RAY_ADDRESS") or config.learner.device != "cpu" or config.server.engine.num_gpus:
        return None
    parts = needed_bytes(config, model_path)
    free = psutil.virtual_memory().available
    if parts is None or sum(parts.values()) <= free:
        return None
    server = config.server
    setting = "num_replicas" if server.max_replicas is None else "max_replicas"
    replicas = f"server.{setting}={server.most_replicas}"
    listed = ", ".join(f"{size / GB:.1f} {name}" for name, size in parts.items())
    return (
        f"This run will need about {sum(parts.values()) / GB:.1f} GB of memory at its peak and this machine "
        f"has {free / GB:.1f} GB free, so Ray may end a process of it: {listed}. Lower "
        f"learner.micro_batch_tokens={config.learner.micro_batch_tokens}, "
        f"fleet.num_actors={config.fleet.num_actors} or {replicas}."
    )


def needed_bytes(config: TrainConfig, model_path: str) -> dict[str, float] | None:
    """Bytes of each part of the run at its peak; ``None`` for a model whose shape is not known here."""
    try:
        shape = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        num_layers, hidden = int(shape["num_hidden_layers"]), int(shape["hidden_size"])
        inner, vocabulary = int(shape["intermediate_size"]), int(shape["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    weights = weight_bytes(Path(model_path), shape)
    engine, learner = config.server.engine, config.learner
    num_sequences = int(engine.options.get("max_num_seqs", MAX_SEQUENCES))
    rank = learner_bytes(
        weights=weights,
        per_token=FLOAT * (num_layers * (13 * hidden + 4 * inner) + 2 * vocabulary),
        num_tokens=learner.micro_batch_tokens,
        trains_all=not learner.lora.rank,
        keeps_reference=algorithm_of(config).uses_reference,
    )
    cache = cache_bytes(model_path, engine)
    replica = ENGINE_PROCESS + cache + 2 * weights + 6 * FLOAT * vocabulary * num_sequences
    return {
        "for the learner": (rank + _teacher_bytes(config)) * learner.num_workers,
        "for the policy server": replica * most_replicas(config),
        "for weights on their way": 2 * weights,
        "for rollout actors": PAIR * num_rollout_actors(config),
        "for Ray and the rest": REST,
    }


def _teacher_bytes(config: TrainConfig) -> float:
    """Bytes of the teacher on a rank, as far as it lies in a folder."""
    teacher = algorithm_of(config).teacher
    if teacher is None:
        return 0
    folder = Path(model_folder(teacher, "algorithm.options.teacher"))
    config_file = folder / "config.json"
    shape = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    return weight_bytes(folder, shape)


def learner_bytes(
    weights: float, per_token: float, num_tokens: int, trains_all: bool, keeps_reference: bool
) -> float:
    """Bytes of one rank at its peak, which is in the optimizer's step or before a backward pass.

    Args:
        weights: bytes of the model in float32.
        per_token: bytes that a token's forward pass keeps for the backward pass, its logits with them.
        num_tokens: in a micro-batch.
    """
    if not trains_all:
        states = step = 2 * weights
    else:  # weights, gradients and two moments; the step makes a copy of some
        states, step = 4 * weights, 6.6 * weights
    reference = weights if keeps_reference and trains_all else 0
    return LEARNER_PROCESS + reference + max(step, states + num_tokens * per_token)


def weight_bytes(folder: Path, shape: dict[str, object]) -> float:
    """Bytes of the model in ``folder`` as float32."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    halved = shape.get("dtype", shape.get("torch_dtype")) in ("bfloat16", "float16")
    return float(size * 2 if halved else size)
