"""What each command checks before it starts anything, in the order in which the checks run."""

from __future__ import annotations

from launch.config import TrainConfig
from launch.validation.settings import check_training_settings
from launch.validation.trial import try_first_task
from launch.validation.workload import check_datasets, check_demonstrations, check_model, check_task_weights
from launch.workload import Workload


def check_training(config: TrainConfig, workload: Workload) -> None:
    """Find what would fail later in a training run.

    Raises:
        ConfigError, DatasetError, AgentError: what is wrong and what to do.
    """
    check_training_settings(config)
    check_datasets(config, workload)
    check_demonstrations(config, workload)
    check_task_weights(config.rollout.task_weights, workload.train_dataset)
    check_model(config, workload)
    try_first_task(workload)
