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

FIELDS_BY_REMEDY: Mapping[str, tuple[str, ...]] = {
    "set learner.micro_batch_tokens, which is what fits through the model at once": (
        *("use_dynamic_bsz", "max_token_len_per_gpu", "infer_max_token_len_per_gpu"),
        *("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu", "ppo_micro_batch_size"),
        *("ppo_micro_batch_size_per_gpu", "ppo_infer_micro_batch_size_per_gpu"),
        *("ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu"),
    ),
    "rows of like length go through the model together, and are not packed: leave it out": (
        *("use_remove_padding", "pad_to_length", "pad_to_length_bucket"),
    ),
    "logits are made for response tokens only: lower learner.micro_batch_tokens if they do not fit": (
        *("use_fused_kernels", "fused_kernel_options", "entropy_from_logits_with_chunking"),
        *("entropy_from_logits_chunk_size", "entropy_checkpointing"),
    ),
    "no part of the learner is compiled: leave it out": ("use_torch_compile",),
    "every rank takes samples of its own: set learner.num_workers": ("ulysses_sequence_parallel_size",),
    "weights and checkpoints are read from the shards of fsdp2: leave it out": ("strategy",),
    "verl's FSDP engine does not read it: leave it out": (
        *("router_replay", "turbo_config", "tiled_mlp", "mtp"),
    ),
    "only verl's first FSDP reads it, and the learner runs on FSDP2: leave it out": ("use_orig_params",),
    "only verl's own trainer reads it, which is not used here: leave it out": (
        *("calculate_sum_pi_squared", "freeze_vision_tower", "use_prefix_grouper", "profiler", "rollout_n"),
        *("model_config", "global_batch_info"),
    ),
    "the engine reads its own: set it in learner.verl.engine": ("fsdp_config", "engine", "qat"),
    "set learner.dtype": ("dtype",),
    "the learner trains: leave it out": ("forward_only",),
    "set seed, which is the run's": ("seed", "data_loader_seed"),
    # the model
    "set model.path": ("path",),
    "it comes with the weights from the folder of model.path": (
        *("local_path", "hf_config_path", "local_hf_config_path", "tokenizer_path", "local_tokenizer_path"),
        *("hf_config", "generation_config", "tokenizer", "processor", "architectures"),
    ),
    "conversations are rendered by the template in the folder of model.path": ("custom_chat_template",),
    "checkpoints contain the tokenizer: leave it out": ("load_tokenizer",),
    "the learner decides, for policy and critic: leave it out": ("model_type",),
    "set learner.lora.rank": ("lora_rank",),
    "set learner.lora; the engines get the weights with the adapters merged in": ("lora",),
    "the engines would start without it: merge it into the weights, with peft's merge_and_unload, and set "
    "model.path to the folder that they are saved to": ("lora_adapter_path",),
    # the optimizer
    "set learner.optimizer, or learner.verl.optimizer": ("optim",),
    "set learner.optimizer.lr": ("lr",),
    "set learner.optimizer.weight_decay": ("weight_decay",),
    "set learner.optimizer.max_grad_norm": ("clip_grad", "grad_clip"),
    "set learner.optimizer.warmup_steps: step k of n has k/n of the rate": (
        *("lr_warmup_steps", "lr_warmup_steps_ratio", "zero_indexed_step"),
    ),
    "set learner.optimizer.min_lr_ratio, which is 1 for a constant rate": (
        *("lr_scheduler_type", "warmup_style", "min_lr_ratio"),
    ),
    "the learning rate falls along half a cycle of a cosine: leave it out": ("num_cycles",),
    "the schedule runs over run.num_steps": ("total_training_steps",),
    "checkpoints are always whole: leave it out": ("checkpoint",),
    # an update
    "set learner.mini_batch_size": ("ppo_mini_batch_size",),
    "set learner.num_epochs": ("ppo_epochs",),
    "rollouts are always shuffled before they are cut into mini-batches: leave it out": ("shuffle",),
    "set algorithm.clip_low and algorithm.clip_high": ("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
    "set algorithm.name=custom and algorithm.loss": ("policy_loss",),
    "set algorithm.loss_aggregation": ("loss_agg_mode",),
    "seq-mean-token-sum-norm divides by rollout.max_response_tokens: set that": ("loss_scale_factor",),
    "set algorithm.entropy_coef": ("entropy_coeff", "calculate_entropy"),
    "set algorithm.kl.place=loss": ("use_kl_loss",),
    "set algorithm.kl.coef": ("kl_loss_coef",),
    "set algorithm.kl.estimator": ("kl_loss_type",),
    "set algorithm.correction.level=bypass": ("use_rollout_log_probs",),
}
"""Fields of any class that would be overwritten or not be read, by what to do instead."""
REMEDIES = {name: remedy for remedy, names in FIELDS_BY_REMEDY.items() for name in names}

OF_ADAPTERS = ("lora_alpha", "target_modules", "target_parameters", "exclude_modules")
OF_GPUS = ("param_offload", "optimizer_offload", "offload_policy", "enable_activation_offload")
"""Fields that move something from a GPU to its host."""
SMALL_MOMENTS = ("8bit", "4bit", "Fp8")
"""Parts of names of optimizers, of bitsandbytes and torchao, whose moments are unlike the weights."""
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
    if name not in FREE[section] and name in REMEDIES:
        raise ConfigError(f"{setting} cannot be set there: {REMEDIES[name]}.")
    if name not in FREE[section]:
        raise ConfigError(f"{setting} is unknown: learner.verl.{section} has {', '.join(FREE[section])}.")
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
    if name == "optimizer" and any(each in str(value) for each in SMALL_MOMENTS):
        raise ConfigError(
            f"{setting} keeps moments of another shape or type than the weights, from which no checkpoint "
            "can go on: leave it out, and set learner.verl.engine.offload_policy=true where a GPU has no "
            "room for AdamW's."
        )
    if name in OF_ADAPTERS and not learner.lora.rank:
        raise ConfigError(
            f"{setting} would have no effect without learner.lora.rank: set that too, or leave it out."
        )
