"""Checks of settings: each by its bound, some against others. A setting without an effect is an error."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields

from actors.serving.keys import access_keys
from actors.settings import AccessConfig
from actors.weights.transport import transport_class
from environments.bounds import check_bounds, check_choice
from environments.errors import ConfigError
from launch.reporting.metrics import evaluation_metrics, is_standard, named_metric
from launch.settings.address import check_address
from launch.settings.tree import (
    COMPLETION,
    OVERLONG,
    TASKS,
    CheckpointConfig,
    RunConfig,
    TrainConfig,
    algorithm_of,
    changed,
)
from launch.validation.serving import check_server_parser
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import check_group_size
from policies.learning.settings import (
    LearnerConfig,
    OptimizerConfig,
    check_keys,
    critic_clip_range,
    critic_optimizer,
    phase_optimizer,
)
from policies.learning.verl.fields import check_fields
from policies.settings import check_nodes

RECORDED = ("curriculum/", "eval/", "learn/", "rollout/", "stream/", "time/")
"""Beginnings of all metrics' names."""


def check_settings(config: TrainConfig) -> None:
    """Check every setting by the bound beside its field, then the settings against each other.

    Raises:
        ConfigError: names the settings, their values and the remedy.
    """
    check_bounds(config)
    _check_checkpoints(config.run)
    algorithm = algorithm_of(config)
    critic_optimizer(config.learner)
    for stage in ("warm_start", "preferences", "expert_iteration"):
        phase_optimizer(f"{stage}.optimizer", getattr(config, stage).optimizer)
    for part in ("fleet", "server", "learner"):
        check_nodes(f"{part}.nodes", getattr(config, part).nodes)
    _check_context(config)
    check_fleet(config)
    _check_groups(config)
    _check_effect_on_learning(config, algorithm)
    _check_micro_batches(config)
    _check_effect_on_serving(config)
    _check_evaluation(config)


def check_training_settings(config: TrainConfig) -> None:
    """``check_settings``, and for training: there are rollouts of a task to compare, and they can differ.

    Raises:
        ConfigError: names the settings, their values and the remedy.
    """
    check_settings(config)
    transport = transport_class(config.server.weights)
    transport.check_dtype(config.server.engine.half_dtype)
    transport.check_use(config.server.colocated, config.evaluation.num_replicas > 0)
    rollout = config.rollout
    algorithm = algorithm_of(config)
    check_group_size(algorithm, rollout.group_size)
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature=0 samples the likeliest token only, so that all rollouts of a task are the "
            "same: training needs a temperature above 0, such as rollout.temperature=1."
        )


def check_evaluation_settings(config: TrainConfig) -> None:
    """Check the settings of an evaluation, as ``check_settings`` does: a recipe's others do not matter.

    Raises:
        ConfigError: names the settings, their values and the remedy.
    """
    check_bounds(config)
    _check_checkpoints(config.run)
    _check_context(config)
    _check_effect_on_serving(config)


def _check_checkpoints(run: RunConfig) -> None:
    check_address("run.checkpoints.to", run.checkpoints.get("to", ""))
    check_keys("run.checkpoints", run.checkpoints, CheckpointConfig())
    if isinstance(run.resume, str):
        check_address("run.resume", run.resume)
        if "/" not in run.resume:
            raise ConfigError(
                f"run.resume={run.resume} is neither true nor false nor an address, such as s3://bucket/run."
            )


def check_fleet(config: TrainConfig) -> None:
    """The number of rollout actors is within its bounds. Raises ``ConfigError``."""
    fleet = config.fleet
    if fleet.max_actors is not None and fleet.max_actors < fleet.num_actors:
        raise ConfigError(
            f"fleet.num_actors={fleet.num_actors} are the fewest rollout actors, and fleet.max_actors="
            f"{fleet.max_actors} the most: raise fleet.max_actors, or leave it out."
        )


def _check_groups(config: TrainConfig) -> None:
    selection, rollout = config.selection, config.rollout
    low, high = selection.reward_range or (None, None)
    if low is not None and high is not None and low > high:
        raise ConfigError(f"selection.reward_range=[{low}, {high}]: {low} is above {high}. Swap them.")
    if selection.min_members is not None and selection.min_members > rollout.group_size:
        raise ConfigError(
            f"selection.min_members={selection.min_members} has to be at most rollout.group_size="
            f"{rollout.group_size}, or null, which means all of them."
        )
    if rollout.group_order == COMPLETION and rollout.max_staleness == 0:
        raise ConfigError(
            f"rollout.group_order={COMPLETION} has no effect with rollout.max_staleness=0: set "
            f"rollout.max_staleness=1, for example, or rollout.group_order={TASKS}."
        )


def _check_effect_on_learning(config: TrainConfig, algorithm: Algorithm) -> None:
    learner = config.learner
    check_fields(learner, algorithm)
    if _critic(learner) != _critic(LearnerConfig()) and not algorithm.uses_critic:
        raise ConfigError(
            f"learner.critic was changed, and algorithm.name={algorithm.name!r} has no critic: leave it out, "
            "or set algorithm.name=ppo."
        )
    by_turn = "algorithm.name=" + algorithm.name if algorithm.turn_weight else "algorithm.credit=per_step"
    if (algorithm.turn_weight or algorithm.credit == "per_step") and config.rollout.max_steps == 1:
        raise ConfigError(f"{by_turn} compares turns: raise rollout.max_steps=1, or leave it out.")
    if OVERLONG in config.selection.masked_reasons and algorithm.overlong_penalty:
        raise ConfigError(
            f"selection.masked_reasons=[{OVERLONG}] leaves out the trajectories that "
            f"algorithm.overlong.penalty={algorithm.overlong_penalty} is meant for: choose one of the two."
        )


def _critic(learner: LearnerConfig) -> tuple[OptimizerConfig, float]:
    return critic_optimizer(learner), critic_clip_range(learner)


def _check_effect_on_serving(config: TrainConfig) -> None:
    server = config.server
    check_server_parser(server.tool_parser)
    access = (f"server.access.{each.name}" for each in fields(AccessConfig))
    for setting in changed(config, "server.http_host", "server.tool_parser", *access):
        if server.http_port is None:
            raise ConfigError(
                f"{setting} has no effect without server.http_port: set that too, for example "
                "server.http_port=8000, or leave it out."
            )
    access_keys(server)
    if server.adapters:
        raise ConfigError(
            f"server.adapters={server.adapters} is for launch.serve. Training and evaluation use the model "
            "of model.path, which may also be a run with adapters (model.path=runs/my-run)."
        )
    if server.versions:
        raise ConfigError(f"server.versions={server.versions} is for launch.serve: leave it out.")


def _check_evaluation(config: TrainConfig) -> None:
    evaluation = config.evaluation
    metrics = evaluation_metrics(()).keys() | {"eval/pass_at_1"}
    best = config.run.best_metric
    if best is None or named_metric(best)[1] not in metrics:
        check_choice("run.best_metric", best, metrics)
    _check_goal(config, metrics)
    if evaluation.num_replicas and not evaluation.every:
        raise ConfigError(
            f"evaluation.num_replicas={evaluation.num_replicas} is for evaluations during training, and "
            "evaluation.every=0 has none: set evaluation.every=10, for example, or evaluation.num_replicas=0."
        )


def _check_goal(config: TrainConfig, evaluated: Collection[str]) -> None:
    """Check that a run can reach its goal. An environment's or a tracker's own metrics have any names.

    Args:
        evaluated: metrics that every evaluation has.
    """
    metric, value = config.run.stop_metric, config.run.stop_at
    if metric is None and value is None:
        return
    if metric is None or value is None:
        raise ConfigError(
            f"run.stop_metric={metric} and run.stop_at={value} belong together: set both, for example "
            "run.stop_metric=eval/reward_mean run.stop_at=0.95, or neither."
        )
    section, slash, name = metric.partition("/")
    if section + slash not in RECORDED or not name:
        raise ConfigError(
            f"run.stop_metric={metric!r} is no metric: its name begins with {', '.join(RECORDED)}, as in "
            "run.stop_metric=eval/reward_mean."
        )
    if section != "eval":
        return
    if is_standard(f"rollout/{name}"):
        check_choice("run.stop_metric", metric, evaluated)
    if config.evaluation.every == 0:
        raise ConfigError(
            f"run.stop_metric={metric} has no effect with evaluation.every=0, which evaluates before the "
            "first and after the last update only: set evaluation.every=10, for example."
        )


def _check_context(config: TrainConfig) -> None:
    rollout = config.rollout
    if rollout.longest > config.server.engine.max_model_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and rollout.max_response_tokens="
            f"{rollout.max_response_tokens} need a context of {rollout.longest} tokens, but server.engine."
            f"max_model_tokens={config.server.engine.max_model_tokens}. Raise it, or lower the other two."
        )


def _check_micro_batches(config: TrainConfig) -> None:
    longest = config.rollout.longest
    if longest > config.learner.row_tokens:
        raise ConfigError(
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens} cannot hold one trajectory of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens. Raise it to "
            f"{math.ceil(longest / config.learner.ranks_of_row)}."
        )
