from __future__ import annotations

import pytest

from environments import BaseEnv, Dataset
from environments.errors import DatasetError
from launch.settings.tree import TrainConfig
from launch.validation.workload import check_datasets
from launch.workload import Workload
from policies import BaseAgent

TASKS = [{"question": "1 + 1?"}]


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"train_dataset": TASKS}, "train_dataset is a list: write train_dataset=Dataset"),
        ({"train_dataset": Dataset(TASKS), "val_dataset": TASKS}, "val_dataset is a list"),
        ({"train_dataset": Dataset([])}, "The training dataset is empty"),
        ({"train_dataset": Dataset(TASKS), "val_dataset": Dataset([])}, "The held-out dataset is empty"),
        ({"train_dataset": None}, "train_dataset is a NoneType"),
    ],
)
def test_tasks_that_are_in_no_dataset_are_told_from_none(datasets, message):
    workload = Workload(agent_class=BaseAgent, env_class=BaseEnv, **datasets)
    with pytest.raises(DatasetError, match=message):
        check_datasets(TrainConfig(), workload)
