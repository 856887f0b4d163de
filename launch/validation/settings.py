"""Settings that cannot work, or that would change nothing."""

from __future__ import annotations

import math

from actors.settings import ServerConfig
from environments.errors import ConfigError
from environments.types import TerminationReason
from launch.config import TrainConfig
from launch.reporting.metrics import evaluation_metrics
from policies.learning.algorithms import Algorithm, check_group_size, resolve
from policies.learning.checks import one_of, within
from policies.learning.kl import check_kl_horizon
from policies.learning.settings import CriticConfig, LoRAConfig, OptimizerConfig

MASKABLE = [
    str(each) for each in TerminationReason if not each.is_failure and each is not TerminationReason.TIMEOUT
]
"""Endings whose trajectories are trained on unless ``selection.masked_reasons`` names them."""


def check_settings(config: TrainConfig) -> None:
    """Check every setting by itself, and the settings against each other.

    Raises:
        ConfigError: names the settings, their values and the remedy.
    """
    algorithm = resolve(config.algorithm, config.rollout.max_response_tokens, config.rollout.max_staleness)
    check_group_size(algorithm, config.rollout.group_size)
    check_kl_horizon(algorithm, config.rollout.groups_per_step * config.rollout.group_size)
    one_of("learner.device", config.learner.device, ("cpu", "cuda"))
    one_of("learner.dtype", config.learner.dtype, ("float32", "bfloat16"))
    for name, optimizer in (
        ("learner.optimizer", config.learner.optimizer),
        ("learner.critic.optimizer", config.learner.critic.optimizer),
        ("warm_start.optimizer", config.warm_start.optimizer),
    ):
        _check_optimizer(name, optimizer)
    for name, (value, smallest) in _counts(config).items():
        if value < smallest:
            raise ConfigError(f"{name}={value} has to be at least {smallest}.")
    within("rollout.temperature", config.rollout.temperature, 0, math.inf, open_below=True)
    within("rollout.timeout_seconds", config.rollout.timeout_seconds, 0, math.inf, open_below=True)
    within("fleet.num_cpus_per_actor", config.fleet.num_cpus_per_actor, 0, math.inf)
    within("learner.mismatch_alarm", config.learner.mismatch_alarm, 0, math.inf)
    within("learner.critic.clip_range", config.learner.critic.clip_range, 0, math.inf, open_below=True)
    _check_lengths(config)
    _check_selection(config)
    _check_idle_settings(config, algorithm)


def _check_optimizer(name: str, optimizer: OptimizerConfig) -> None:
    one_of(f"{name}.schedule", optimizer.schedule, ("constant", "cosine"))
    within(f"{name}.lr", optimizer.lr, 0, math.inf)
    within(f"{name}.warmup_steps", optimizer.warmup_steps, 0, math.inf)
    within(f"{name}.min_lr_ratio", optimizer.min_lr_ratio, 0, 1)
    within(f"{name}.weight_decay", optimizer.weight_decay, 0, math.inf)
    within(f"{name}.max_grad_norm", optimizer.max_grad_norm, 0, math.inf, open_below=True)
    if optimizer.min_lr_ratio and optimizer.schedule == "constant":
        raise ConfigError(
            f"{name}.min_lr_ratio={optimizer.min_lr_ratio} is where a cosine schedule ends, and "
            f"{name}.schedule=constant has no end: set {name}.schedule=cosine, or {name}.min_lr_ratio=0."
        )


def _check_selection(config: TrainConfig) -> None:
    selection, rollout = config.selection, config.rollout
    for reason in selection.masked_reasons:
        one_of("selection.masked_reasons", reason, MASKABLE)
    low, high = selection.min_reward, selection.max_reward
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"selection.min_reward={low} is above selection.max_reward={high}: no group can be between them."
        )
    if selection.min_members is not None and not 1 <= selection.min_members <= rollout.group_size:
        raise ConfigError(
            f"selection.min_members={selection.min_members} has to be between 1 and rollout.group_size="
            f"{rollout.group_size}, or null, which is all of them."
        )


def _check_idle_settings(config: TrainConfig, algorithm: Algorithm) -> None:
    """Refuse settings that would change nothing."""
    learner, evaluation = config.learner, config.evaluation
    if learner.critic != CriticConfig() and not algorithm.uses_critic:
        raise ConfigError(
            f"learner.critic was changed, and algorithm.name={algorithm.name!r} has no critic: leave it out, "
            "or set algorithm.name=ppo."
        )
    if not learner.lora.rank and learner.lora != LoRAConfig():
        raise ConfigError(
            "learner.lora was changed, and learner.lora.rank=0 trains without adapters: set "
            "learner.lora.rank=16, for example, or leave it out."
        )
    if algorithm.credit == "per_step" and config.rollout.max_steps == 1:
        raise ConfigError(
            "algorithm.credit=per_step compares turns, and rollout.max_steps=1 has one only: leave it out, "
            "or allow more steps."
        )
    if algorithm.bypass and algorithm.loss == "gpg":
        raise ConfigError(
            f"algorithm.correction.mode=bypass has no effect in algorithm.name={algorithm.name!r}: its loss "
            "gpg has no ratio to old log-probabilities. Leave it out."
        )
    server = config.server
    if server.http_port is None and server.http_host != ServerConfig().http_host:
        raise ConfigError(
            f"server.http_host={server.http_host} has no effect without server.http_port: set that too, for "
            "example server.http_port=8000, or leave it out."
        )
    if server.adapters:
        raise ConfigError(
            f"server.adapters={server.adapters} is for launch.serve: what is trained or evaluated is "
            "the model of model.path, and a run with adapters is one (model.path=runs/my-run)."
        )
    if config.rollout.overlong_filter and algorithm.overlong_penalty:
        raise ConfigError(
            f"rollout.overlong_filter=true leaves out the very trajectories that algorithm.overlong_penalty="
            f"{algorithm.overlong_penalty} is there for: choose one of the two."
        )
    one_of("run.best_metric", config.run.best_metric, evaluation_metrics(()).keys() | {"eval/pass_at_1"})
    if evaluation.num_replicas and not evaluation.every:
        raise ConfigError(
            f"evaluation.num_replicas={evaluation.num_replicas} is for evaluations during training, and "
            "evaluation.every=0 has none: set evaluation.every=10, for example, or evaluation.num_replicas=0."
        )


def _check_lengths(config: TrainConfig) -> None:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if longest > config.server.engine.max_model_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and rollout.max_response_tokens="
            f"{rollout.max_response_tokens} need a context of {longest} tokens, but server.engine."
            f"max_model_tokens={config.server.engine.max_model_tokens}. Raise it, or lower the other two."
        )
    if longest > config.learner.micro_batch_tokens:
        raise ConfigError(
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens} cannot hold one trajectory of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens. Raise it to that."
        )


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _counts(config: TrainConfig) -> dict[str, tuple[int, int]]:
    """Numbers of things, and the smallest that makes sense."""
    return {
        "run.num_steps": (config.run.num_steps, 1),
        "run.checkpoint_every": (config.run.checkpoint_every, 1),
        "run.checkpoints_kept": (config.run.checkpoints_kept, 1),
        "rollout.groups_per_step": (config.rollout.groups_per_step, 1),
        "rollout.group_size": (config.rollout.group_size, 1),
        "rollout.max_staleness": (config.rollout.max_staleness, 0),
        "rollout.max_steps": (config.rollout.max_steps, 1),
        "rollout.max_prompt_tokens": (config.rollout.max_prompt_tokens, 1),
        "rollout.max_response_tokens": (config.rollout.max_response_tokens, 1),
        "selection.max_dropped": (config.selection.max_dropped, 1),
        "rollout.max_turn_tokens": (_or(config.rollout.max_turn_tokens, 1), 1),
        "evaluation.every": (config.evaluation.every, 0),
        "evaluation.num_tasks": (config.evaluation.num_tasks, 1),
        "evaluation.num_replicas": (config.evaluation.num_replicas, 0),
        "fleet.num_actors": (config.fleet.num_actors, 1),
        "fleet.retries": (config.fleet.retries, 0),
        "learner.num_workers": (config.learner.num_workers, 1),
        "learner.mini_batch_size": (config.learner.mini_batch_size, 1),
        "learner.lora.rank": (config.learner.lora.rank, 0),
        "server.num_replicas": (config.server.num_replicas, 1),
        "warm_start.num_steps": (config.warm_start.num_steps, 0),
        "warm_start.batch_size": (config.warm_start.batch_size, 1),
    }
