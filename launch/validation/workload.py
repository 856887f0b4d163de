"""What a configuration asks of the workload and of the model's folder."""

from __future__ import annotations

import math

from environments.data.datasets import Dataset
from environments.errors import ConfigError, DatasetError
from launch.config import TrainConfig
from launch.run_folder.model_paths import model_folder
from launch.workload import Workload


def check_datasets(config: TrainConfig, workload: Workload) -> None:
    """There are tasks to train on, and held-out tasks where an evaluation is asked for.

    Raises:
        DatasetError: there is no task to train on, or tasks are not in a Dataset.
        ConfigError: settings about evaluations, and no held-out tasks.
    """
    datasets = {"train_dataset": workload.train_dataset, "val_dataset": workload.val_dataset}
    for name, tasks in datasets.items():
        if tasks is not None and not isinstance(tasks, Dataset):
            raise DatasetError(f"{name} is of type {type(tasks).__name__}: pass a Dataset, Dataset(tasks).")
    if not workload.train_dataset:
        raise DatasetError("The training dataset is empty: pass a Dataset with at least one task.")
    evaluation = config.evaluation
    if workload.val_dataset is None and (
        evaluation.every or evaluation.num_replicas or config.run.best_metric
    ):
        raise ConfigError(
            f"evaluation.every={evaluation.every}, evaluation.num_replicas={evaluation.num_replicas} and "
            f"run.best_metric={config.run.best_metric} are about evaluations, and the workload has no "
            "val_dataset: give it one, or leave them out."
        )


def check_task_weights(key: str | None, tasks: Dataset) -> None:
    """Every task has a weight, and one is above 0. Raises ``DatasetError``."""
    if key is None:
        return
    weights = [task.get(key) for task in tasks]
    for index, weight in enumerate(weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DatasetError(
                f"rollout.task_weights={key!r}, and task {index} has {key}={weight!r}: give every task a "
                "number that is not negative."
            )
    if not any(weights):
        raise DatasetError(f"rollout.task_weights={key!r}, and it is 0 for every task: none would be played.")


def check_model(config: TrainConfig, workload: Workload) -> None:
    """The model's folder is complete, or a tiny model can be built. Raises ``ConfigError``."""
    options = config.model.chat_template_kwargs
    if config.model.path is not None:
        folder = model_folder(config.model.path)
        if options:
            from policies.chat import ChatRenderer, load_tokenizer

            ChatRenderer(load_tokenizer(folder), options)  # raises for an unknown option
    elif options:
        raise ConfigError(
            f"model.chat_template_kwargs={options}, but model.path is not set, and the chat template of the "
            "tiny model has no options: leave them out."
        )
    elif not workload.demonstrations:
        raise ConfigError(
            "model.path is not set, and the workload has no demonstrations to build a tiny model from: "
            "set model.path to a Hugging Face name or folder."
        )
