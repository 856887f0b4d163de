from __future__ import annotations

from dataclasses import replace

import pytest

from environments import Dataset
from launch.checkpoint import Progress
from launch.config import RolloutConfig, TrainConfig
from launch.orders import derived_seed, epoch_order, evaluation_orders, training_orders

TASKS = Dataset([{"question": str(index)} for index in range(10)], name="tasks", split="train")
CONFIG = TrainConfig(seed=7, rollout=RolloutConfig(groups_per_step=4, group_size=3, temperature=0.7))


def orders_of_step(step: int, config: TrainConfig = CONFIG):
    groups = step * config.rollout.groups_per_step
    return training_orders(config, TASKS, Progress(step=step, version=step, num_groups=groups))


def test_a_step_orders_every_member_of_its_groups() -> None:
    orders = orders_of_step(0)
    assert len({order.rollout_id for order in orders}) == len(orders) == 12
    for group in {order.group_id for order in orders}:
        members = [order for order in orders if order.group_id == group]
        assert len(members) == 3
        assert all(member.task == members[0].task for member in members)
        assert len({member.seed for member in members}) == 3
    assert all(order.params.temperature == 0.7 for order in orders)


def test_the_same_progress_gives_the_same_orders() -> None:
    first = orders_of_step(5)
    epoch_order.cache_clear()  # as in a process that has just begun
    assert orders_of_step(5) == first


def test_steps_and_seeds_differ() -> None:
    seeds = [order.seed for step in range(10) for order in orders_of_step(step)]
    assert len(set(seeds)) == len(seeds)
    other = replace(CONFIG, seed=8)
    assert [order.seed for order in orders_of_step(0)] != [order.seed for order in orders_of_step(0, other)]
    assert epoch_order(10, 7, 0) != epoch_order(10, 8, 0)


def test_rollouts_have_to_be_sampled_by_the_published_version() -> None:
    assert {order.min_version for order in orders_of_step(6)} == {6}


def test_every_epoch_plays_each_task_once_in_an_order_of_its_own() -> None:
    steps = [orders_of_step(step) for step in range(10)]  # 40 groups are 4 epochs; steps straddle them
    played = [order.task["question"] for orders in steps for order in orders[::3]]
    epochs = [played[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(task["question"] for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_evaluations_play_the_same_tasks_with_the_same_seeds_at_every_step() -> None:
    first = evaluation_orders(CONFIG, TASKS, Progress(step=0, version=1))
    later = evaluation_orders(CONFIG, TASKS, Progress(step=9, version=10))
    assert [(each.task, each.seed) for each in first] == [(each.task, each.seed) for each in later]
    assert not {each.rollout_id for each in first} & {each.rollout_id for each in later}
    assert {each.min_version for each in later} == {10}


@pytest.mark.parametrize(("wanted", "played"), [(4, 4), (200, 10)])
def test_an_evaluation_plays_what_is_asked_for_or_all_there_is(wanted: int, played: int) -> None:
    config = TrainConfig()
    config.evaluation.num_tasks = wanted
    assert len(evaluation_orders(config, TASKS, Progress())) == played


def test_derived_seeds_fit_where_a_turn_is_added_to_them() -> None:
    seeds = [derived_seed(0, str(index)) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**62 for seed in seeds)
