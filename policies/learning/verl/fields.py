"""Fields of verl's configuration classes that ``learner.verl`` may set, and what decides all others.

Does not import verl: the fields are checked where a command starts, before any model is loaded. A test
compares the lists with verl's classes, so that a field of a new release does not pass unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environments.bounds import check_choice
from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.settings import LearnerConfig

FREE: Mapping[str, tuple[str, ...]] = {
    "engine": (
        *("param_offload", "optimizer_offload", "offload_policy", "full_determinism", "wrap_policy"),
        *("reshard_after_forward", "fsdp_size", "forward_prefetch", "model_dtype", "mixed_precision"),
        *("use_no_sync_for_gradient_accumulation", "qat"),
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

_TOKENS = "set learner.micro_batch_tokens, which is what fits through the model at once"
_ROWS = "rows of like length go through the model together, and are not packed: leave it out"
_LOGITS = "logits are made for response tokens only: lower learner.micro_batch_tokens if they do not fit"
_NO_COMPILE = "no part of the learner is compiled: leave it out"
_READ_FROM_PATH = "it comes with the weights from the folder of model.path"
_FSDP1 = "only verl's first FSDP reads it, and the learner runs on FSDP2: leave it out"
_OTHER_BACKEND = "verl's FSDP engine does not read it: leave it out"
_TRAINER = "only verl's own trainer reads it, which is not used here: leave it out"
_ENGINE = "the engine reads its own: set it in learner.verl.engine"
_WARMUP = "set learner.optimizer.warmup_steps"

FIXED: Mapping[str, Mapping[str, str]] = {
    "engine": {
        "strategy": "weights and checkpoints are read from the shards of fsdp2: leave it out",
        "dtype": "set learner.dtype",
        "forward_only": "the learner trains: leave it out",
        "seed": "set seed, which is the run's",
        "use_dynamic_bsz": _TOKENS,
        "max_token_len_per_gpu": _TOKENS,
        "micro_batch_size_per_gpu": _TOKENS,
        "infer_max_token_len_per_gpu": _TOKENS,
        "infer_micro_batch_size_per_gpu": _TOKENS,
        "use_remove_padding": _ROWS,
        "pad_to_length": _ROWS,
        "pad_to_length_bucket": _ROWS,
        "use_fused_kernels": _LOGITS,
        "entropy_from_logits_with_chunking": _LOGITS,
        "entropy_from_logits_chunk_size": _LOGITS,
        "entropy_checkpointing": _LOGITS,
        "use_torch_compile": _NO_COMPILE,
        "ulysses_sequence_parallel_size": "every rank takes samples of its own: set learner.num_workers",
        "router_replay": _OTHER_BACKEND,
        "turbo_config": _OTHER_BACKEND,
        "use_orig_params": _FSDP1,
    },
    "model": {
        "path": "set model.path",
        "local_path": _READ_FROM_PATH,
        "hf_config_path": _READ_FROM_PATH,
        "local_hf_config_path": _READ_FROM_PATH,
        "tokenizer_path": _READ_FROM_PATH,
        "local_tokenizer_path": _READ_FROM_PATH,
        "hf_config": _READ_FROM_PATH,
        "generation_config": _READ_FROM_PATH,
        "tokenizer": _READ_FROM_PATH,
        "processor": _READ_FROM_PATH,
        "architectures": _READ_FROM_PATH,
        "custom_chat_template": "conversations are rendered by the template in the folder of model.path",
        "load_tokenizer": "checkpoints contain the tokenizer: leave it out",
        "model_type": "the learner decides, for policy and critic: leave it out",
        "lora_rank": "set learner.lora.rank",
        "lora": "set learner.lora; the engines get the weights with the adapters merged in",
        "lora_adapter_path": "the engines would start without it: merge it into the weights, with peft's "
        "merge_and_unload, and set model.path to the folder that they are saved to",
        "use_remove_padding": _ROWS,
        "use_fused_kernels": _LOGITS,
        "fused_kernel_options": _LOGITS,
        "tiled_mlp": _OTHER_BACKEND,
        "mtp": _OTHER_BACKEND,
    },
    "optimizer": {
        "lr": "set learner.optimizer.lr",
        "weight_decay": "set learner.optimizer.weight_decay",
        "clip_grad": "set learner.optimizer.max_grad_norm",
        "grad_clip": "set learner.optimizer.max_grad_norm",
        "lr_warmup_steps": _WARMUP,
        "lr_warmup_steps_ratio": _WARMUP,
        "zero_indexed_step": f"{_WARMUP}: step k of n has k/n of the rate",
        "lr_scheduler_type": "set learner.optimizer.min_lr_ratio, which is 1 for a constant rate",
        "warmup_style": "set learner.optimizer.min_lr_ratio, which is 1 for a constant rate",
        "min_lr_ratio": "set learner.optimizer.min_lr_ratio",
        "num_cycles": "the learning rate falls along half a cycle of a cosine: leave it out",
        "total_training_steps": "the schedule runs over run.num_steps",
    },
    "actor": {
        "ppo_mini_batch_size": "set learner.mini_batch_size",
        "ppo_epochs": "set learner.num_epochs",
        "shuffle": "rollouts are always shuffled before they are cut into mini-batches: leave it out",
        "data_loader_seed": "set seed, which is the run's",
        "ppo_micro_batch_size": _TOKENS,
        "ppo_micro_batch_size_per_gpu": _TOKENS,
        "ppo_infer_micro_batch_size_per_gpu": _TOKENS,
        "ppo_max_token_len_per_gpu": _TOKENS,
        "ppo_infer_max_token_len_per_gpu": _TOKENS,
        "use_dynamic_bsz": _TOKENS,
        "clip_ratio": "set algorithm.clip_low and algorithm.clip_high",
        "clip_ratio_low": "set algorithm.clip_low",
        "clip_ratio_high": "set algorithm.clip_high",
        "policy_loss": "set algorithm.name=custom and algorithm.loss",
        "loss_agg_mode": "set algorithm.loss_aggregation",
        "loss_scale_factor": "seq-mean-token-sum-norm divides by rollout.max_response_tokens: set that",
        "entropy_coeff": "set algorithm.entropy_coef",
        "calculate_entropy": "set algorithm.entropy_coef",
        "use_kl_loss": "set algorithm.kl.place=loss",
        "kl_loss_coef": "set algorithm.kl.coef",
        "kl_loss_type": "set algorithm.kl.estimator",
        "use_rollout_log_probs": "set algorithm.correction.level=bypass",
        "grad_clip": "set learner.optimizer.max_grad_norm",
        "optim": "set learner.optimizer, or learner.verl.optimizer",
        "checkpoint": "checkpoints are always whole: leave it out",
        "strategy": "weights and checkpoints are read from the shards of fsdp2: leave it out",
        "use_remove_padding": _ROWS,
        "use_fused_kernels": _LOGITS,
        "ulysses_sequence_parallel_size": "every rank takes samples of its own: set learner.num_workers",
        "fsdp_config": _ENGINE,
        "engine": _ENGINE,
        "qat": _ENGINE,
        "use_torch_compile": _NO_COMPILE,
        "pad_to_length": _ROWS,
        "entropy_from_logits_with_chunking": _LOGITS,
        "entropy_from_logits_chunk_size": _LOGITS,
        "entropy_checkpointing": _LOGITS,
        "calculate_sum_pi_squared": _TRAINER,
        "freeze_vision_tower": _TRAINER,
        "use_prefix_grouper": _TRAINER,
        "profiler": _TRAINER,
        "rollout_n": _TRAINER,
        "model_config": _TRAINER,
        "global_batch_info": _TRAINER,
    },
}
"""Fields that would be overwritten or not be read, each with what to do instead."""

OF_ADAPTERS = ("lora_alpha", "target_modules", "target_parameters", "exclude_modules")
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
        for name, value in given.items():
            _check_field(section, name, value, learner, algorithm)


def _check_field(section: str, name: str, value: Any, learner: LearnerConfig, algorithm: Algorithm) -> None:
    setting = f"learner.verl.{section}.{name}={value!r}"
    if name in FIXED[section]:
        raise ConfigError(f"{setting} cannot be set there: {FIXED[section][name]}.")
    if name not in FREE[section]:
        raise ConfigError(f"{setting} is unknown: learner.verl.{section} has {', '.join(FREE[section])}.")
    if name in LOSSES_THAT_READ and algorithm.loss not in LOSSES_THAT_READ[name]:
        raise ConfigError(
            f"{setting} would have no effect in algorithm.name={algorithm.name!r}: its loss {algorithm.loss} "
            f"does not read it, but {', '.join(LOSSES_THAT_READ[name])}. Leave it out."
        )
    if name in OF_ADAPTERS and not learner.lora.rank:
        raise ConfigError(
            f"{setting} would have no effect without learner.lora.rank: set that too, or leave it out."
        )
