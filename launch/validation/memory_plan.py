"""Memory that each process of a run will need at its peak, from the settings and the model's ``config.json``.

    ModelShape ──▶ processes(config, shape) ──▶ plan_text: a table, what fits, and the settings to change
                                          └──▶ memory_notice: a warning, as a run on this machine starts

No weights are read and no model is made. The figures of processes on CPUs are those of runs on x86-64, which
``tests/benchmarks/memory_plan.py`` measures beside the plan; those of GPUs are arithmetic that nobody has
measured. The shapes known are decoders of the usual kind and with latent attention, dense or a mixture of
experts, and a transformer of pictures before one: its weights are counted, and not what pictures take on
their way through it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import psutil

from environments.errors import ConfigError
from launch.run_folder.model_paths import model_folder
from launch.settings.compose import with_overrides
from launch.settings.tree import TrainConfig, algorithm_of
from launch.validation.resources import most_replicas, num_gpus, num_rollout_actors
from policies import tiny
from policies.engines.vllm_settings import MAX_SEQUENCES, cache_bytes, token_bytes
from policies.learning.algorithm import Algorithm
from policies.learning.verl.fields import NUM_EXPERTS, check_base, in_four_bits, small_moment
from policies.model_files import config_of

GB = 1e9
FULL, HALF = 4, 2
"""Bytes of a number."""
FOUR_BITS = 0.5 + HALF / 64
"""Bytes of a weight in four bits, with its part of the scale of 64."""
LEARNER_PROCESS = 0.53 * GB
"""A rank without its model: Python, torch and verl."""
ENGINE_PROCESS = 0.61 * GB
"""A replica without its model: Python, torch, vLLM and Serve."""
PAIR = 0.07 * GB
"""A rollout actor with one pair."""
SHARED_PAIR = 0.009 * GB
"""A pair and its part of a rollout actor that has 16 of them."""
REST = 1.53 * GB
"""Ray, Serve's controller, the driver, the fleet, the sampler and the weight store."""
GPU_CONTEXT = 1.0 * GB
"""CUDA and NCCL in a process. Not measured."""
LOGIT_BYTES = 3 * FULL
"""Bytes of a logit at the peak: the model's own, the chosen tokens', and the softmax or its gradient."""
HOST = "Host memory"
GPU_SHARE = 0.9
"""Share of a GPU that vLLM takes unless its options say another."""

TINY = {**tiny.SIZES, "vocab_size": tiny.VOCABULARY, "tie_word_embeddings": True}
"""Shape of the model of a run without ``model.path``, if its tokenizer is as large as it may be."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder: numbers of layers and tokens, and widths of what a token has in each layer.

    Attributes:
        attention: inputs and outputs of each linear layer of attention.
        heads, shared_heads: width of all queries, and of all keys.
        inner: width of the feed-forward network, of those experts together that a token takes.
        experts: number of them that a layer holds for each that a token takes.
        always: width of the experts that each token takes beside them.
        dense_inner: widths of the first layers that have a network instead of experts.
        vision: number of parameters of the part that reads pictures, and of those that adapters have in it
            for each of their rank.
    """

    config: Mapping[str, Any]
    num_layers: int
    hidden: int
    attention: tuple[tuple[int, int], ...]
    heads: int
    shared_heads: int
    inner: int
    experts: float
    always: int
    dense_inner: tuple[int, ...]
    vocabulary: int
    tied: bool
    vision: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read ``config.json``.

        Raises:
            ConfigError: the model is of another kind.
        """
        try:
            if "vision_config" in config:
                config = _completed(config)
            text = {**config, **config.get("text_config", {})}
            hidden = int(text["hidden_size"])
            held = next((int(text[each]) for each in NUM_EXPERTS if text.get(each)), 1)
            taken = min(held, int(text.get("num_experts_per_tok") or text.get("moe_k") or 1))
            width = int((held > taken and text.get("moe_intermediate_size")) or text["intermediate_size"])
            shared = int(text.get("n_shared_experts") or text.get("moe_num_shared_experts") or 0)
            num_dense = int(text.get("first_k_dense_replace") or text.get("moe_layer_start_index") or 0)
            attention = _latent_attention(text) if "kv_lora_rank" in text else _attention(text)
            return cls(
                config=text,
                num_layers=int(text["num_hidden_layers"]),
                hidden=hidden,
                attention=attention,
                heads=attention[-1][0],
                shared_heads=attention[-2][1],
                inner=taken * width,
                experts=held / taken,
                always=shared * width + int(text.get("shared_expert_intermediate_size") or 0),
                dense_inner=(int(text["intermediate_size"]),) * num_dense,
                vocabulary=int(text["vocab_size"]),
                tied=bool(text.get("tie_word_embeddings", "gemma" in str(text.get("model_type")))),
                vision=_vision(config, hidden) if "vision_config" in config else (0, 0),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"A model with model_type={config.get('model_type')!r} cannot be planned by its config.json "
                f"({error!r}): plan a decoder such as Llama or Qwen3 of a like size."
            ) from error

    @property
    def embedding(self) -> int:
        """Number of parameters of embedding and output layer."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Number of parameters of a layer, without its few biases; of the larger kind where there are two."""
        return self._layer(self.inner * self.experts + self.always)

    def _layer(self, inner: float) -> int:
        attention = sum(inputs * outputs for inputs, outputs in self.attention)
        return int(attention + 3 * self.hidden * inner + 2 * self.hidden)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        others = self.num_layers - len(self.dense_inner)
        layers = sum(map(self._layer, self.dense_inner)) + others * self.layer
        return self.embedding + layers + self.hidden + self.vision[0]

    def bytes(self, number: float, of_layers: float) -> float:
        """Bytes of all parameters, of ``number`` each, and ``of_layers`` in the layers."""
        return number * self.embedding + of_layers * (self.num_parameters - self.embedding)

    def adapters(self, rank: int) -> int:
        """Number of parameters of LoRA on all linear layers but the output and the experts."""
        attention = sum(map(sum, self.attention))
        dense = 3 * (self.hidden + self.inner) if self.experts == 1 else 0
        return rank * (self.num_layers * (attention + dense) + self.vision[1])

    @property
    def kept(self) -> int:
        """Numbers that a token's pass through a layer keeps for the backward pass: inputs of norms, linear
        layers, attention and product.
        """
        inner = self.inner + self.always
        return 9 * self.hidden + 3 * self.heads + 3 * self.shared_heads + 4 * inner


def _attention(text: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the layers of queries, keys, values and the output."""
    hidden, num_heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head = int(text.get("head_dim") or hidden // num_heads)
    shared = int(text.get("num_key_value_heads") or num_heads) * head
    return (hidden, num_heads * head), (hidden, shared), (hidden, shared), (num_heads * head, hidden)


def _latent_attention(text: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """The same of DeepSeek's latent attention: keys and values are made of a few numbers of each token."""
    hidden, num_heads, latent = (
        int(text[each]) for each in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, turned, value = (
        int(text[each]) for each in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    queries = num_heads * (plain + turned)
    narrow = int(text.get("q_lora_rank") or 0)
    of_queries = ((hidden, narrow), (narrow, queries)) if narrow else ((hidden, queries),)
    keys_and_values = (latent, num_heads * (plain + value))
    return *of_queries, (hidden, latent + turned), keys_and_values, (num_heads * value, hidden)


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config.json`` with what its model type has by default: those of models for pictures leave it out."""
    from transformers import AutoConfig

    completed: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    return completed


def _vision(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """``ModelShape.vision``: patches and their positions, layers, and a linear layer from several patches to
    a token. Exact for Idefics3; other families have one more layer here or there.
    """
    vision = config["vision_config"]
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    num_layers = int(vision.get("num_hidden_layers") or vision["depth"])
    patch, side = (_length(vision.get(name) or 0) for name in ("patch_size", "image_size"))
    joined = int(config.get("scale_factor") or vision.get("spatial_merge_size") or 1) ** 2 * width
    num_linear = 3 if vision.get("out_hidden_size") else 2  # Qwen's have a gate
    attention = 4 * (width * width + width)
    layer = attention + num_linear * width * inner + (num_linear - 1) * inner + width + 4 * width
    patches = 3 * patch**2 * width + width + (side // patch) ** 2 * width
    adapted = num_layers * (8 * width + num_linear * (width + inner)) + joined + hidden
    return patches + num_layers * layer + 2 * width + joined * hidden, adapted


def _length(side: int | Sequence[int]) -> int:
    """A side of a square, which some configurations write twice."""
    return side if isinstance(side, int) else side[0]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process and its bytes at its peak. ``on_gpu`` says that they lie on a GPU."""

    name: str
    count: int
    on_gpu: bool = False
    program: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    checkpoint: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    cache: float = 0.0

    @property
    def bytes(self) -> float:
        """Sum of all parts."""
        return sum(getattr(self, part) for part in PARTS)


PARTS = [each.name for each in fields(Process) if each.type == "float"]


@dataclass(frozen=True)
class Devices:
    """GPUs, and the bytes of each."""

    count: int
    bytes: float

    @classmethod
    def of(cls, text: str) -> Devices:
        """Read ``8x80`` (8 GPUs of 80 GB) or ``4x8x80`` (4 nodes with as many). Raises ``ConfigError``."""
        if not re.fullmatch(r"(\d+x){1,2}\d+(\.\d+)?", text):
            raise ConfigError(
                f"--plan {text} names no devices: write their number and the GB of each, as in --plan 8x80, "
                "or nodes x GPUs x GB, as in --plan 4x8x80."
            )
        *numbers, size = text.split("x")
        devices = cls(math.prod(map(int, numbers)), float(size) * GB)
        if not devices.count or not devices.bytes:
            raise ConfigError(f"--plan {text} has no GPU or no memory: use numbers above 0.")
        return devices

    @classmethod
    def here(cls) -> Devices:
        """Find the GPUs of this machine. Raises ``ConfigError`` if there are none."""
        import torch

        sizes = [
            torch.cuda.get_device_properties(each).total_memory for each in range(torch.cuda.device_count())
        ]
        if not sizes:
            raise ConfigError("torch finds no GPU here: name some, as in --plan 8x80 (8 of 80 GB).")
        return cls(len(sizes), min(sizes))


def shape_of(config: TrainConfig) -> ModelShape:
    """The shape of the model of a run; without ``model.path`` that of the largest tiny one.

    Raises:
        ConfigError: its ``config.json`` cannot be had, or is of another kind.
    """
    if (path := config.model.path) is None:
        return ModelShape.of(TINY)
    shape = ModelShape.of(described := config_of(model_folder(path)))
    check_base(config.learner, f"model.path={path!r}", described)
    return shape


def processes(config: TrainConfig, shape: ModelShape, gpu_bytes: float = 0.0) -> list[Process]:
    """All processes of a run at their peaks.

    Args:
        gpu_bytes: memory of a GPU, of which an engine takes its share.
    """
    learner, engine = config.learner, config.server.engine
    algorithm = algorithm_of(config)
    reference = _trained(shape, learner.lora.rank) if algorithm.uses_reference else 0
    rows = _ranks("learner rank", config, shape, learner.lora.rank, _teacher_size(algorithm), reference)
    if algorithm.uses_critic:
        critic = _ranks("critic rank", config, replace(shape, tied=True), lora_rank=0)
        rows += [replace(row, logits=0.0) for row in critic]
    rows += _replicas(
        config, shape, gpu_bytes, sum(row.count * (row.activations + row.logits) for row in rows)
    )
    published = shape.num_parameters * (HALF if engine.half_dtype else FULL)
    rows += [
        Process(name="reference", count=1, weights=FULL * reference),  # all ranks' shares of it, on the host
        # The newest two versions, and the copy in the ranks.
        Process(name="weights on their way", count=1, weights=3 * published),
        _pairs(config),
        Process(name="Ray and the rest", count=1, program=REST),
    ]
    return [row for row in rows if row.count and row.bytes]


def _pairs(config: TrainConfig) -> Process:
    """The rollout actors, or their pairs where several share one."""
    is_shared = config.fleet.pairs_per_actor > 1
    name, size = ("pair", SHARED_PAIR) if is_shared else ("rollout actor", PAIR)
    return Process(name=name, count=num_rollout_actors(config), program=size)


def _trained(shape: ModelShape, lora_rank: int) -> int:
    """Number of parameters that are trained."""
    return shape.adapters(lora_rank) if lora_rank else shape.num_parameters


def _teacher_size(algorithm: Algorithm) -> int:
    """Number of parameters of the teacher that ranks load; 0 without one."""
    if not algorithm.loaded_teacher:
        return 0
    setting = "algorithm.options.teacher"
    return ModelShape.of(config_of(model_folder(algorithm.loaded_teacher, setting), setting)).num_parameters


def _ranks(
    name: str,
    config: TrainConfig,
    shape: ModelShape,
    lora_rank: int,
    teacher_size: int = 0,
    reference: int = 0,
) -> list[Process]:
    """Ranks of FSDP2: each has a share of master weights, gradients and Adam's moments, and of a teacher's
    weights, the layers that it has gathered, and its largest micro-batch. On GPUs a part of each lies on the
    host, and there the copy of weights and moments that a checkpoint is written from. On CPUs nothing is
    copied that is not trained, and the copy counts as far as it is larger than what an update takes for a
    while, gradients and micro-batch: a disk that is as slow as updates takes more. After it the weights are
    exported one by one, each read from the file into the whole tensor: the largest lies beside what an update
    has left in the heap, which is all but the logits.
    """
    learner = config.learner
    on_gpu, num_ranks = learner.device == "cuda", max(1, learner.num_workers)
    model, engine = learner.verl.get("model", {}), learner.verl.get("engine", {})
    number = HALF if learner.dtype == "bfloat16" else FULL
    master = HALF if engine.get("model_dtype") in ("bf16", "bfloat16") else FULL
    shards = engine.get("fsdp_size", -1)
    shards = shards if 0 < shards < num_ranks else num_ranks
    is_small = lora_rank > 0 and in_four_bits(learner)
    base = shape.bytes(master, FOUR_BITS if is_small else master)
    whole = (base + master * teacher_size) / shards
    trained = master * _trained(shape, lora_rank) / shards
    moments = 2 * trained * (small_moment(learner.verl.get("optimizer", {})) or master) / master
    gathered = number * (shape.embedding + 2 * shape.layer)
    if not lora_rank:
        gathered += FULL * shape.layer  # the gradient of a layer before it is shared out
    if not on_gpu and num_ranks == 1 and number == master == FULL:
        gathered = 0  # see ``UndividedEngine``
    tokens, kept = _micro_batch(config), shape.num_layers * shape.kept
    if model.get("enable_gradient_checkpointing", on_gpu):
        kept = shape.num_layers * shape.hidden + shape.kept
    copy = (base + master * (2 * _trained(shape, lora_rank) + reference)) / num_ranks
    rank = Process(
        name=name,
        count=learner.num_workers,
        program=LEARNER_PROCESS,
        weights=whole + gathered,
        gradients=trained,
        optimizer=moments,
        activations=tokens * number * kept,
        logits=tokens * shape.vocabulary * LOGIT_BYTES,
    )
    # verl reads the model on the first rank's host, or on each one's if embedding and output are the same.
    loaded = FULL * max(shape.num_parameters, teacher_size) / (1 if shape.tied else num_ranks)
    if not on_gpu:
        copy -= (base - master * _trained(shape, lora_rank)) / num_ranks
        exported = 2 * master * shape.vocabulary * shape.hidden / num_ranks  # one of them has it
        passing = rank.gradients + rank.activations + rank.logits
        rank = replace(rank, checkpoint=max(0.0, copy - passing, exported - rank.logits))
        if is_small:  # it was read whole
            rank = replace(rank, weights=rank.weights + max(0.0, rank.program + loaded - rank.bytes))
        return [rank]
    host = Process(name=f"{name} on the host", count=num_ranks, program=LEARNER_PROCESS)
    host = replace(host, weights=loaded, checkpoint=copy)
    turns = config.server.colocated
    if turns or engine.get("offload_policy"):
        host = replace(host, weights=max(whole, loaded), gradients=trained, optimizer=moments)
    if engine.get("offload_policy"):
        rank = replace(rank, weights=gathered, gradients=0, optimizer=0)
    else:  # the step copies a moment, when activations are gone
        copied = max(0.0, trained - rank.activations - rank.logits)
        rank = replace(rank, optimizer=rank.optimizer + copied)
    contexts = 2 if turns else 1  # a sleeping engine keeps its own
    return [replace(rank, on_gpu=True, program=contexts * GPU_CONTEXT), host]


def _micro_batch(config: TrainConfig) -> int:
    """Tokens of the largest micro-batch of a rank, all of them in responses."""
    learner, rollout, stages = config.learner, config.rollout, config.stages
    samples = [
        learner.mini_batch_size,
        config.warm_start.batch_size if config.warm_start.num_steps and "warm_start" in stages else 0,
        2 * config.preferences.pairs_per_step if "preferences" in stages else 0,
    ]
    of_a_group = math.ceil(max(samples) * learner.ranks_of_row / max(1, learner.num_workers))
    return min(learner.micro_batch_tokens, math.ceil(of_a_group * rollout.longest / learner.ranks_of_row))


def _replicas(config: TrainConfig, shape: ModelShape, gpu_bytes: float, passing: float) -> list[Process]:
    """Replicas. On GPUs each has a part on every one of its own, where its cache takes what its share leaves,
    and a part on the host.

    Args:
        passing: bytes that the learner has in its own turn only. Where engines and learner take turns, that
            is no time for a cache: the larger of the two counts.
    """
    engine, count = config.server.engine, most_replicas(config)
    number = HALF if engine.half_dtype else FULL
    num_sequences = int(engine.options.get("max_num_seqs") or MAX_SEQUENCES)
    logits = num_sequences * shape.vocabulary * LOGIT_BYTES
    weights = number * shape.num_parameters
    host = Process(name="replica", count=count, program=ENGINE_PROCESS)
    if not engine.num_gpus:
        # vLLM packs a copy for the CPU's kernels, and new weights arrive in a third.
        cache = float(cache_bytes(shape.config, engine))
        if config.server.colocated:
            cache = max(0.0, cache - passing / count) if count else 0.0
        return [replace(host, weights=3 * weights, logits=logits, cache=cache)]
    spread = math.ceil(engine.num_gpus)
    least = engine.max_model_tokens * token_bytes(shape.config, engine) / spread
    left = _engine_share(config) * gpu_bytes - GPU_CONTEXT - (weights + logits) / spread
    gpu = Process(
        name=host.name,
        count=count * spread,
        on_gpu=True,
        program=GPU_CONTEXT,
        weights=weights / spread,
        logits=logits / spread,
        cache=max(least, left),
    )
    return [gpu, replace(host, name="replica on the host", weights=weights if config.server.colocated else 0)]


def _engine_share(config: TrainConfig) -> float:
    """Share of a GPU that an engine takes."""
    return float(config.server.engine.options.get("gpu_memory_utilization", GPU_SHARE))


def plan_text(config: TrainConfig, shape: ModelShape, devices: Devices | None) -> str:
    """The plan of a run: each process, what fits, and the settings to change where something does not.

    Args:
        devices: the GPUs to plan for; ``None`` for those of this machine.

    Raises:
        ConfigError: GPUs are given and none is used, or they are needed and neither given nor here.
    """
    needed = num_gpus(config)
    if not needed and devices is not None:
        raise ConfigError(
            f"learner.device={config.learner.device} and server.engine.num_gpus=0 use none of the "
            f"{devices.count} GPU(s) of --plan: add learner.device=cuda server.engine.num_gpus=1, or leave "
            "the devices out, to plan for the memory of this machine."
        )
    if needed and devices is None:
        devices = Devices.here()
    devices = devices or Devices(0, 0.0)
    rows = processes(config, shape, devices.bytes)
    lines = [
        f"Peak memory by plan, of {shape.num_parameters / 1e6:,.1f} M parameters.",
        f"The largest micro-batch is full, with {_micro_batch(config):,} tokens, all sampled: "
        "runs with shorter rollouts take less.",
        "",
        *_table(rows),
        "",
    ]
    if needed > devices.count:
        lines.append(
            f"{needed:g} GPU(s) are needed, and there are {devices.count}: lower learner.num_workers="
            f"{config.learner.num_workers} or server.num_replicas={config.server.num_replicas}."
        )
    for name in dict.fromkeys(row.name for row in rows if row.on_gpu):
        share = _engine_share(config) if name == "replica" else 1.0
        lines += _verdict(config, shape, name, devices, share * devices.bytes)
    if not needed:
        lines += _verdict(config, shape, HOST, devices, psutil.virtual_memory().available)
    else:
        lines.append(f"{HOST}: {_bytes(rows, HOST) / GB:.1f} GB, of all nodes together.")
    return "\n".join(lines)


def _table(rows: Sequence[Process]) -> list[str]:
    """Lines of a table in GB: a process a line, and after it the sum."""
    heads = ["GB of each", "number", *PARTS, "sum"]
    cells = [
        [
            row.name + (" (GPU)" if row.on_gpu else ""),
            str(row.count),
            *(f"{size / GB:.2f}" if (size := getattr(row, part)) else "" for part in PARTS),
            f"{row.bytes / GB:.2f}",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = []
    for first, *others in (heads, *cells):
        figures = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *figures]))
    return lines


def _bytes(rows: Sequence[Process], name: str) -> float:
    """Bytes of a process on a GPU, or of all that lies in the host's memory."""
    if name == HOST:
        return sum(row.count * row.bytes for row in rows if not row.on_gpu)
    return max(row.bytes for row in rows if row.name == name)


def _verdict(
    config: TrainConfig, shape: ModelShape, name: str, devices: Devices, limit: float
) -> Iterator[str]:
    """Lines on what is needed of ``limit`` bytes, and the changes that lower it, the greatest first."""

    def needed(changed: TrainConfig) -> float:
        return _bytes(processes(changed, shape, devices.bytes), name)

    def fits(size: float) -> bool:
        return size < limit + 1  # a byte more: sums are rounded

    size = needed(config)
    yield f"{name}: {size / GB:.1f} GB of {limit / GB:.1f} GB: {'fits' if fits(size) else 'DOES NOT FIT'}."
    if fits(size):
        return
    sizes = {}
    for change in _changes(config):
        changed = with_overrides(asdict(config), change.split())
        if num_gpus(changed) <= devices.count and needed(changed) < size:
            sizes[change] = needed(changed)
    for change, after in sorted(sizes.items(), key=lambda each: each[1]):
        yield f"  {change}: {after / GB:.1f} GB{', fits' * fits(after)}"
    size = needed(with_overrides(asdict(config), " ".join(sizes).split()))
    if not (fits(size) and any(map(fits, sizes.values()))):
        yield f"  with all of that {size / GB:.1f} GB, {'fits' if fits(size) else 'still too much'}"


def _changes(config: TrainConfig) -> Iterator[str]:
    """Settings that take less memory than those of ``config``."""
    learner, engine, longest = config.learner, config.server.engine, config.rollout.longest
    if longest < learner.micro_batch_tokens:
        yield f"learner.micro_batch_tokens={longest}"
    if not learner.lora.rank:
        yield "learner.lora.rank=16"
    if learner.device == "cuda":
        yield f"learner.num_workers={2 * learner.num_workers}"
        yield "learner.dtype=bfloat16"
        yield "learner.verl.engine.offload_policy=true"
    else:
        yield "learner.verl.model.enable_gradient_checkpointing=true"
    if engine.num_gpus:
        spread = 2 * math.ceil(engine.num_gpus)
        yield f"server.engine.num_gpus={spread} server.engine.options.tensor_parallel_size={spread}"
    else:
        num_sequences = engine.options.get("max_num_seqs") or MAX_SEQUENCES
        yield f"server.engine.options.max_num_seqs={math.ceil(num_sequences / 2)}"
        yield f"fleet.num_actors={math.ceil(config.fleet.num_actors / 2)}"
    if not engine.half_dtype:
        yield "server.engine.options.dtype=bfloat16"


def memory_notice(config: TrainConfig, model_path: str) -> str | None:
    """A sentence if the run will need more memory than this machine has free; else ``None``.

    Only for a run on CPUs that starts its own Ray: on a cluster its parts lie on several machines.
    """
    if os.environ.get("RAY_ADDRESS") or num_gpus(config):
        return None
    try:
        rows = processes(config, ModelShape.of(config_of(model_path)))
    except ConfigError:
        return None  # a model whose shape is not known here
    needed, free = _bytes(rows, HOST), psutil.virtual_memory().available
    if needed <= free:
        return None
    listed = ", ".join(f"{row.count} x {row.bytes / GB:.1f} for {row.name}" for row in rows)
    return (
        f"This run will need about {needed / GB:.1f} GB of memory at its peak and this machine has "
        f"{free / GB:.1f} GB free, so Ray may end a process of it: {listed}. The same command with --plan "
        "names the settings to change."
    )
