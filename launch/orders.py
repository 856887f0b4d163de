"""Which rollouts a step asks for: a function of configuration, tasks and progress, so that runs repeat."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

from actors.rollout import RolloutOrder
from environments.datasets import Dataset
from launch.checkpoint import Progress
from launch.config import TrainConfig
from policies.sampler import SamplingParams


def training_orders(config: TrainConfig, tasks: Dataset, progress: Progress) -> list[RolloutOrder]:
    """``group_size`` rollouts of each of the next tasks; every epoch has its own order."""
    params = SamplingParams(temperature=config.rollout.temperature)
    orders = []
    for number in range(progress.num_groups, progress.num_groups + config.rollout.groups_per_step):
        epoch, position = divmod(number, len(tasks))
        task = tasks[epoch_order(len(tasks), config.seed, epoch)[position]]
        for member in range(config.rollout.group_size):
            rollout_id = f"{number:08d}/{member:04d}"
            orders.append(
                RolloutOrder(
                    rollout_id=rollout_id,
                    group_id=f"{number:08d}",
                    task=task,
                    params=params,
                    seed=derived_seed(config.seed, rollout_id),
                    env_seed=environment_seed(config.seed, f"{number:08d}"),
                    min_version=progress.version,
                )
            )
    return orders


def evaluation_orders(config: TrainConfig, tasks: Dataset, progress: Progress) -> list[RolloutOrder]:
    """One rollout of each of the first ``evaluation.num_tasks`` tasks, the same at every evaluation."""
    params = SamplingParams(temperature=config.rollout.temperature)
    return [
        RolloutOrder(
            rollout_id=f"eval-{progress.step}-{index:06d}/0000",
            group_id=f"eval-{progress.step}-{index:06d}",
            task=tasks[index],
            params=params,
            seed=derived_seed(config.seed, f"eval/{index}"),
            env_seed=environment_seed(config.seed, f"eval/{index}"),
            min_version=progress.version,
        )
        for index in range(min(config.evaluation.num_tasks, len(tasks)))
    ]


def derived_seed(seed: int, name: str) -> int:
    """A 62-bit seed for ``name``: neighbouring names have unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 2


def environment_seed(seed: int, name: str) -> int:
    """A 30-bit seed for the environments of a group: many libraries take no larger one."""
    return derived_seed(seed, f"environment/{name}") & (1 << 30) - 1


@lru_cache(maxsize=2)
def epoch_order(num_tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of the tasks in ``epoch``."""
    order = list(range(num_tasks))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return tuple(order)
