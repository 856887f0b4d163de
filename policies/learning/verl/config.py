"""Our settings in verl's words: the configuration objects of its workers and losses.

Modules that import verl import this one first: verl settles on its device as soon as it is imported, and the
``cpu`` that we teach it has to be there by then. It also puts our engine in the place of verl's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.settings import LearnerConfig, OptimizerConfig, critic_clip_range
from policies.learning.verl.fields import QUANTIZATION

if os.environ.get("VERL_PLATFORM") == "cpu":
    from policies.learning.verl import cpu_platform

    cpu_platform.install()

from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.workers.config import (
    CriticConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)

from policies.learning.verl import engine

engine.install()

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
CHECKPOINT_CONTENTS = ["extra"]


def worker_config(
    model_type: str,
    model_path: str,
    learner: LearnerConfig,
    optimizer: OptimizerConfig,
    num_schedule_steps: int,
    adapters: Mapping[str, Any] | None = None,
) -> TrainingWorkerConfig:
    """verl's worker for a ``language_model`` or a ``value_model``, with fields of verl's about its
    ``adapters``.
    """
    precision = PRECISION[learner.dtype]
    return TrainingWorkerConfig(
        model_type=model_type,
        model_config=_verl(
            HFModelConfig,
            "model",
            learner,
            path=model_path,
            use_remove_padding=learner.ranks_of_row > 1,  # nothing reads it, but verl asks for it there
            enable_gradient_checkpointing=learner.device != "cpu",
            override_config={"attn_implementation": "sdpa"},
            **(adapters or {}),
        ),
        engine_config=_verl(
            FSDPEngineConfig,
            "engine",
            learner,
            strategy="fsdp2",
            fsdp_size=-1,
            use_torch_compile=False,
            use_remove_padding=False,
            dtype=learner.dtype,
            model_dtype="fp32",
            mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_dynamic_bsz=True,
            max_token_len_per_gpu=learner.micro_batch_tokens,
            infer_max_token_len_per_gpu=learner.micro_batch_tokens,
        ),
        optimizer_config=optimizer_config(optimizer, learner, num_schedule_steps),
        checkpoint_config=CheckpointConfig(
            save_contents=CHECKPOINT_CONTENTS, load_contents=CHECKPOINT_CONTENTS
        ),
    )


def optimizer_config(
    optimizer: OptimizerConfig, learner: LearnerConfig, num_schedule_steps: int
) -> FSDPOptimizerConfig:
    """AdamW and its schedule over ``num_schedule_steps`` calls of ``update``.

    Steps count from 1: verl's own constant schedule counts from 0, so that a warm-up's first step learns
    nothing. A cosine that ends where it began is constant.
    """
    return _verl(
        FSDPOptimizerConfig,
        "optimizer",
        learner,
        lr=optimizer.lr,
        lr_scheduler_type="cosine",
        zero_indexed_step=False,
        lr_warmup_steps=optimizer.warmup_steps,
        min_lr_ratio=optimizer.min_lr_ratio,
        total_training_steps=num_schedule_steps,
        weight_decay=optimizer.weight_decay,
        betas=(0.9, 0.95),
        clip_grad=optimizer.max_grad_norm,
    )


def actor_config(learner: LearnerConfig, algorithm: Algorithm) -> FSDPActorConfig:
    """Return what verl's ``ppo_loss`` reads.

    verl's own cap of the ratio, 3, is that of the dual clip; a loss that caps its importance weights with it
    has a cap of its own.

    The sums of seq-mean-token-sum-norm are divided by the length that a response may have, not by that of
    the micro-batch's longest, which is verl's default.
    """
    cap = algorithm.policy_loss.ratio_cap
    return _verl(
        FSDPActorConfig,
        "actor",
        learner,
        strategy="fsdp2",
        rollout_n=1,  # verl asks for it, but only its own trainer reads it
        use_dynamic_bsz=True,
        use_torch_compile=False,
        clip_ratio=algorithm.clip_low,
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        loss_agg_mode=algorithm.loss_aggregation,
        loss_scale_factor=algorithm.max_response_tokens,
        entropy_coeff=algorithm.entropy_coef,
        use_kl_loss=False,  # ``policy_loss`` adds the term itself
        policy_loss=PolicyLossConfig(loss_mode=_loss_in_verl(algorithm)),
        **({} if cap is None else {"clip_ratio_c": cap}),
    )


def _loss_in_verl(algorithm: Algorithm) -> str:
    """The name by which verl finds the policy loss: a user's is registered with it, under its options."""
    function = algorithm.policy_loss.function
    if function is None:
        return algorithm.loss
    options = {each.name: algorithm.options[each.name] for each in fields(algorithm.policy_loss.options)}
    name = f"{algorithm.loss} {options}"
    register_policy_loss(name)(partial(function, **options))
    return name


def critic_config(learner: LearnerConfig) -> CriticConfig:
    """Return what verl's ``value_loss`` reads. A value is the token's own, so its loss is the mean over
    tokens."""
    return CriticConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        cliprange_value=critic_clip_range(learner),
        loss_agg_mode="token-mean",
    )


def _verl(cls: type, section: str, learner: LearnerConfig, **ours: Any) -> Any:
    """``cls`` with our settings, and over them the user's own from ``learner.verl.<section>``; dicts, such as
    ``override_config``, are merged. What is kept in four bits is not verl's to know: transformers would
    expect it so in the model's file.
    """
    given = dict(learner.verl.get(section, {}))
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(ours.get(name), dict):
            given[name] = {key: each for key, each in (ours[name] | value).items() if key != QUANTIZATION}
    try:
        return cls(**(ours | given))
    except (TypeError, ValueError, AttributeError, AssertionError, StrictDataclassError) as error:
        raise ConfigError(f"verl rejects learner.verl.{section}: {error}") from error
