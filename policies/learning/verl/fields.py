"""Fields of verl's configuration classes that ``learner.verl`` may set; any other is an error.

Does not import verl: the fields are checked where a command starts, before any model is loaded. A test
compares the lists with verl's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from environments.bounds import check_choice
from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.settings import SEQUENCE_RANKS, LearnerConfig

FREE: Mapping[str, tuple[str, ...]] = {
    "engine": (
        *("param_offload", "optimizer_offload", "offload_policy", "full_determinism", "wrap_policy"),
        *("reshard_after_forward", "fsdp_size", "forward_prefetch", "model_dtype", "mixed_precision"),
        *("use_no_sync_for_gradient_accumulation", "ulysses_sequence_parallel_size"),
    ),
    "model": (
        *("use_shm", "trust_remote_code", "external_lib", "override_config"),
        *("enable_gradient_checkpointing", "enable_activation_offload", "use_liger"),
        *("lora_alpha", "target_modules", "target_parameters", "exclude_modules"),
    ),
    "optimizer": ("optimizer", "optimizer_impl", "override_optimizer_config", "betas"),
    "actor": ("clip_ratio_c", "tau_pos", "tau_neg"),
}
"""Fields that verl acts on, and nothing here sets or contradicts."""

KINDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("a number", (int, float), "fsdp_size lora_alpha clip_ratio_c tau_pos tau_neg"),
    ("a text", (str,), "model_dtype optimizer optimizer_impl external_lib"),
    ("a map", (dict,), "wrap_policy mixed_precision override_config override_optimizer_config"),
    ("a list or a text", (list, tuple, str), "target_modules target_parameters exclude_modules betas"),
)
"""Kinds of values with their types, and the fields that have one. All others are true or false."""

OWN_SETTINGS: Mapping[str, str] = {
    "algorithm.clip_low and algorithm.clip_high": "clip_ratio clip_ratio_low clip_ratio_high",
    "algorithm.correction.level": "use_rollout_log_probs",
    "algorithm.entropy_coef": "entropy_coeff calculate_entropy",
    "algorithm.kl": "use_kl_loss kl_loss_coef kl_loss_type",
    "algorithm.loss_aggregation": "loss_agg_mode loss_scale_factor",
    "algorithm.name": "policy_loss",
    "learner.dtype": "dtype",
    "learner.lora.rank": "lora lora_rank",
    "learner.micro_batch_tokens": "use_dynamic_bsz max_token_len_per_gpu infer_max_token_len_per_gpu "
    "micro_batch_size_per_gpu infer_micro_batch_size_per_gpu ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
    "ppo_infer_max_token_len_per_gpu use_fused_kernels entropy_checkpointing",
    "learner.mini_batch_size": "ppo_mini_batch_size",
    "learner.num_epochs": "ppo_epochs",
    "learner.optimizer.lr": "lr",
    "learner.optimizer.max_grad_norm": "clip_grad grad_clip",
    "learner.optimizer.min_lr_ratio": "lr_scheduler_type warmup_style min_lr_ratio",
    "learner.optimizer.warmup_steps": "lr_warmup_steps lr_warmup_steps_ratio",
    "learner.optimizer.weight_decay": "weight_decay",
    "learner.verl.engine": "fsdp_config engine",
    "learner.verl.model.override_config.attn_implementation=flash_attention_2": "use_remove_padding",
    "learner.verl.optimizer": "optim",
    "model.path, with adapters merged by peft's merge_and_unload": "lora_adapter_path",
    "model.path": "path local_path hf_config_path tokenizer_path hf_config tokenizer custom_chat_template",
    "seed": "seed data_loader_seed",
}
"""Settings that stand for fields of verl's."""

QUANTIZATION = "quantization_config"
"""Field of ``learner.verl.model.override_config`` for a base in four bits beneath adapters (QLoRA)."""
IN_FOUR_BITS: Mapping[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
"""Value of that field, whose second part may be left out."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that models have for the number of a layer's experts."""
SCALED_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions that transformers derives anew from the largest position of each pass."""
OF_ADAPTERS = ("lora_alpha", "target_modules", "target_parameters", "exclude_modules")
OF_GPUS = ("param_offload", "optimizer_offload", "offload_policy", "enable_activation_offload")
"""Fields that move something from a GPU to its host."""
SMALL_MOMENTS = {"8bit": 1.0, "Fp8": 1.0, "4bit": 0.5}
"""Bytes of a moment, by a part of the name of an optimizer of bitsandbytes or torchao."""
LOSSES_THAT_READ: Mapping[str, tuple[str, ...]] = {
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
}


def check_fields(learner: LearnerConfig, algorithm: Algorithm) -> None:
    """Find what ``learner.verl`` has that would not be acted on.

    Raises:
        ConfigError: names the field, its value and the remedy.
    """
    for section, given in learner.verl.items():
        check_choice("learner.verl", section, FREE)
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"learner.verl.{section}={given!r} has no fields, of which there are "
                f"{', '.join(FREE[section])}: write name: value for some, or leave it out."
            )
        for name, value in given.items():
            _check_field(section, name, value, learner, algorithm)


def _check_field(section: str, name: str, value: Any, learner: LearnerConfig, algorithm: Algorithm) -> None:
    setting = f"learner.verl.{section}.{name}={value!r}"
    if name not in FREE[section]:
        own = next((own for own, names in OWN_SETTINGS.items() if name in names.split()), None)
        remedy = "leave it out, nothing here acts on it" if own is None else f"set {own}"
        free = ", ".join(FREE[section])
        raise ConfigError(f"{setting} cannot be set there: {remedy}; learner.verl.{section} has {free}.")
    kinds = ((kind, types) for kind, types, names in KINDS if name in names.split())
    kind, types = next(kinds, ("true or false", (bool,)))
    if f"learner.verl.{section}.{name}" == SEQUENCE_RANKS:
        _check_sequence_ranks(setting, value, learner.num_workers)
    elif type(value) not in types:
        raise ConfigError(f"{setting} has to be {kind}: write one, or leave it out.")
    if name in LOSSES_THAT_READ and algorithm.loss not in LOSSES_THAT_READ[name]:
        raise ConfigError(
            f"{setting} would have no effect in algorithm.name={algorithm.name!r}: its loss {algorithm.loss} "
            f"does not read it, but {', '.join(LOSSES_THAT_READ[name])}. Leave it out."
        )
    if name in OF_GPUS and value and learner.device == "cpu":
        raise ConfigError(
            f"{setting} would have no effect with learner.device=cpu, where all lies on the host: leave it "
            "out."
        )
    overrides = value if name == "override_config" and isinstance(value, Mapping) else {}
    if str(overrides.get("attn_implementation", "")).startswith("flash_attention"):
        _check_flash_attention(setting, learner)
    if QUANTIZATION in overrides:
        _check_quantization(f"{setting.partition('=')[0]}.{QUANTIZATION}", overrides[QUANTIZATION], learner)
    if name in ("optimizer", "optimizer_impl"):
        _check_optimizer(learner.verl["optimizer"])
    if name in OF_ADAPTERS and not learner.lora.rank:
        raise ConfigError(
            f"{setting} would have no effect without learner.lora.rank: set that too, or leave it out."
        )


def _check_sequence_ranks(setting: str, value: Any, num_ranks: int) -> None:
    """Ranks can be divided into groups of so many. Raises ``ConfigError``."""
    if type(value) is not int or value < 1 or num_ranks % value:
        raise ConfigError(
            f"{setting} is no divisor of learner.num_workers={num_ranks}: so many ranks compute each row "
            "together. Set one that divides the other, or leave it out."
        )


def _check_flash_attention(setting: str, learner: LearnerConfig) -> None:
    """Flash attention can run on what the learner has. Raises ``ConfigError``."""
    if learner.device == "cpu" or learner.dtype != "bfloat16":
        raise ConfigError(
            f"{setting} with learner.device={learner.device} and learner.dtype={learner.dtype}: flash "
            "attention has kernels for GPUs and bfloat16. Set learner.device=cuda learner.dtype=bfloat16, or "
            "leave it out."
        )
    if find_spec("flash_attn") is None:
        raise ConfigError(
            f"{setting}: the package flash_attn is not installed, and not among the pins. Install it "
            "(.venv/bin/pip install --no-deps --no-build-isolation flash-attn), or leave the setting out: "
            "samples share what they have in common then."
        )


def in_four_bits(learner: LearnerConfig) -> bool:
    """True if the frozen layers beneath adapters are kept in four bits."""
    overrides = learner.verl.get("model", {}).get("override_config")
    return isinstance(overrides, Mapping) and QUANTIZATION in overrides


def _check_quantization(setting: str, given: Any, learner: LearnerConfig) -> None:
    """A base can be kept as ``given``. Raises ``ConfigError``."""
    kept = given if isinstance(given, Mapping) and "load_in_4bit" in given else {}
    if not kept or {**IN_FOUR_BITS, **kept} != IN_FOUR_BITS:
        raise ConfigError(
            f"{setting}={given!r} is not offered: it takes load_in_4bit=true alone, which is NF4 with a "
            "scale for 64 weights. Leave the rest out."
        )
    if not learner.lora.rank:
        raise ConfigError(
            f"{setting}={given!r} keeps weights that cannot be trained, but have adapters: set "
            "learner.lora.rank=16, or leave it out."
        )


def check_base(learner: LearnerConfig, setting: str, config: Mapping[str, Any]) -> None:
    """A model, by its ``config.json``, can be kept as the learner is to keep it.

    Raises:
        ConfigError: its file is quantized, or it has experts and is to be kept in four bits, or heads that
            the ranks of a row cannot share.
    """
    if QUANTIZATION in config:
        raise ConfigError(
            f"{setting} has quantized weights, which the learner cannot train: name the model that they were "
            "made from, with learner.lora.rank=16 for less memory, and with "
            f"learner.verl.model.override_config.{QUANTIZATION}.load_in_4bit=true (QLoRA) for still less."
        )
    text = {**config, **config.get("text_config", {})}
    held = next((name for name in NUM_EXPERTS if text.get(name, 1) not in (None, 0, 1)), None)
    if held is not None and in_four_bits(learner):
        raise ConfigError(
            f"{setting} has {held}={text[held]}, and transformers keeps the experts of a layer in one tensor "
            f"that stays as it is: leave learner.verl.model.override_config.{QUANTIZATION} out."
        )
    if (num_heads := text.get("num_attention_heads") or 0) % learner.ranks_of_row:
        raise ConfigError(
            f"{setting} has num_attention_heads={num_heads}, which is no multiple of "
            f"{SEQUENCE_RANKS}={learner.ranks_of_row}: set a number that divides it, or leave it out."
        )
    if learner.ranks_of_row > 1 and (found := _undivided_by(text)):
        raise ConfigError(
            f"{setting} has {found}, with which ranks cannot each compute a part of a row: leave "
            f"{SEQUENCE_RANKS}={learner.ranks_of_row} out, and set learner.micro_batch_tokens to the longest "
            "sample."
        )


def _undivided_by(text: Mapping[str, Any]) -> str:
    """The entry of a ``config.json`` for which ranks cannot compute a row together; else an empty text."""
    others = sorted({*(text.get("layer_types") or ())} - {"full_attention"})
    rope, window = str(text.get("rope_parameters") or text.get("rope_scaling")), text.get("sliding_window")
    if others:
        return f"layer_types={others}"
    if any(kind in rope for kind in SCALED_BY_LENGTH):
        return f"rope_scaling={rope}"
    return f"sliding_window={window}" if window and text.get("use_sliding_window", True) else ""


def small_moment(optimizer: Mapping[str, Any]) -> float | None:
    """Return the bytes of a moment of ``learner.verl.optimizer``; ``None`` if it is as large as a weight."""
    name = str(optimizer.get("optimizer", ""))
    return next((size for part, size in SMALL_MOMENTS.items() if part in name), None)


def _check_optimizer(given: Mapping[str, Any]) -> None:
    """An optimizer's package is there, and takes what FSDP2 shards. Raises ``ConfigError``."""
    package = str(given.get("optimizer_impl", "torch.optim")).partition(".")[0]
    name = str(given.get("optimizer", "AdamW"))
    if small_moment(given) and package in ("torch", "bitsandbytes"):
        raise ConfigError(
            f"learner.verl.optimizer.optimizer={name!r} is not in torch, and bitsandbytes' takes no shards "
            "of FSDP2: take torchao's, which is not among the pins, with "
            "learner.verl.optimizer.optimizer_impl=torchao.optim."
        )
    if find_spec(package) is None:
        raise ConfigError(
            f"learner.verl.optimizer.optimizer_impl={given['optimizer_impl']!r}: the package {package} is "
            f"not installed. Install it (.venv/bin/pip install --no-deps {package}), or leave it out."
        )
