"""The checks of every command before it starts anything, in the order in which they run."""

from __future__ import annotations

from environments.bounds import check_bounds
from environments.errors import ConfigError
from launch.config import TrainConfig
from launch.training.stages.chosen import chosen_stages
from launch.validation.serving import check_address, check_base_model, check_engine
from launch.validation.settings import check_settings, check_training_settings
from launch.validation.trial import try_first_task
from launch.validation.workload import check_datasets, check_model, check_task_weights
from launch.workload import Workload


def check_training(config: TrainConfig, workload: Workload) -> None:
    """Find what would fail later in a training run.

    Raises:
        ConfigError, DatasetError, AgentError: the first mistake, with its remedy.
    """
    check_training_settings(config)
    check_engine(config)
    stages = chosen_stages(config)
    check_datasets(config, workload)
    for stage in stages:
        stage.check_workload(workload)
    check_task_weights(config.rollout.task_weights, workload.train_dataset)
    check_model(config, workload)
    try_first_task(workload)


def check_evaluation(config: TrainConfig) -> None:
    """Find what would fail later in an evaluation. Raises ``ConfigError``."""
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set: name the model to evaluate, a run such as model.path=runs/my-run (its "
            "newest checkpoint), a checkpoint, a Hugging Face folder or name."
        )
    check_settings(config)
    check_engine(config)


def check_serving(config: TrainConfig) -> None:
    """Find what would fail later in serving; ``server.http_port`` is set. Raises ``ConfigError``."""
    check_bounds(config)
    check_engine(config)
    assert config.server.http_port is not None
    check_address(config.server.http_host, config.server.http_port)
    check_base_model(config)
