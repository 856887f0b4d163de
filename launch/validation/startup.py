"""The checks of every command before it starts anything, in the order in which they run."""

from __future__ import annotations

from actors.serving.keys import access_keys
from environments.bounds import check_bounds
from environments.errors import ConfigError
from launch.config import TrainConfig, without_training
from launch.training.stages.chosen import chosen_stages
from launch.validation.gpus import check_gpus
from launch.validation.replay import check_replay
from launch.validation.serving import check_base_model, check_engine, check_tool_parsers
from launch.validation.settings import check_evaluation_settings, check_fleet, check_training_settings
from launch.validation.trial import try_first_task
from launch.validation.workload import (
    check_classes,
    check_datasets,
    check_held_out_tasks,
    check_model,
    check_task_weights,
)
from launch.workload import Workload


def check_training(config: TrainConfig, workload: Workload) -> None:
    """Find what would fail later in a training run.

    Raises:
        ConfigError, DatasetError, AgentError, ContractError: the first mistake, with its remedy.
    """
    check_training_settings(config)
    check_engine(config)
    stages = chosen_stages(config)
    check_replay(config, sum(stage.num_steps for stage in stages if stage.rolls_out))
    check_classes(workload)
    check_datasets(config, workload)
    for stage in stages:
        stage.check_workload(workload)
    check_task_weights(config.rollout.task_weights, workload.train_dataset)
    check_gpus(config)
    check_model(config, workload)
    check_tool_parsers(config, workload)
    if config.run.replay is None:  # else nothing is played, and the environment need not run here
        try_first_task(workload, workload.train_dataset)


def check_evaluation(config: TrainConfig) -> None:
    """Find what would fail later in an evaluation, as far as its settings go.

    Raises:
        ConfigError: the first mistake, with its remedy.
    """
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set: name the model to evaluate, a run such as model.path=runs/my-run (its "
            "newest checkpoint), a checkpoint, a Hugging Face folder or name."
        )
    check_evaluation_settings(config)
    check_engine(config)
    check_gpus(without_training(config))


def check_evaluated_workload(config: TrainConfig, workload: Workload) -> None:
    """Find what would fail later in an evaluation's rollouts.

    Raises:
        ConfigError, DatasetError, AgentError, ContractError: the first mistake, with its remedy.
    """
    check_classes(workload)
    check_tool_parsers(config, workload)
    try_first_task(workload, check_held_out_tasks(workload))


def check_served_agent(config: TrainConfig, workload: Workload) -> None:
    """Find what would keep the workload's agent from answering clients.

    Raises:
        ConfigError: it does not say which task a message is, or a class is not usable.
        AgentError, ContractError: the agent or the environment broke its contract.
    """
    check_classes(workload)
    if workload.task_from_message is None:
        raise ConfigError(
            "The workload has no task_from_message, so its agent cannot answer clients: add it "
            "(.docs/pages/guide.md shows how), or leave recipe and workload out to serve the policy alone."
        )
    check_tool_parsers(config, workload)
    try_first_task(workload, workload.train_dataset)


def check_serving(config: TrainConfig) -> None:
    """Find what would fail later in serving, but for a taken port. Raises ``ConfigError``."""
    check_bounds(config)
    check_fleet(config)
    check_engine(config)
    check_gpus(without_training(config))
    access_keys(config.server)
    check_base_model(config)
    check_tool_parsers(config, None)
