from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from environments import Dataset
from launch.settings.tree import RolloutConfig, TrainConfig
from launch.training.rollout_requests import (
    derived_seed,
    epoch_order,
    evaluation_requests,
    group_requests,
    task_index,
    tasks_digest,
)
from policies.sampler import SamplingParams

TASKS = Dataset([{"question": str(index)} for index in range(10)], name="tasks", split="train")
CONFIG = TrainConfig(seed=7, rollout=RolloutConfig(groups_per_step=4, group_size=3, temperature=0.7))


def requests_of_step(step: int, config: TrainConfig = CONFIG, tasks: Dataset = TASKS):
    """The requests of the groups of an update, when each update has the weights of the one before."""
    per_step = config.rollout.groups_per_step
    return [
        request
        for number in range(step * per_step, (step + 1) * per_step)
        for request in group_requests(
            config, tasks[task_index(config, tasks, number, {})], False, number, step
        )
    ]


def test_every_member_of_a_group_is_ordered() -> None:
    requests = requests_of_step(0)
    assert len({request.rollout_id for request in requests}) == len(requests) == 12
    for group in {request.group_id for request in requests}:
        members = [request for request in requests if request.group_id == group]
        assert len(members) == 3
        assert all(member.task == members[0].task for member in members)
        assert len({member.seed for member in members}) == 3
    assert all(request.params.temperature == 0.7 for request in requests)


def test_same_progress_gives_the_same_orders() -> None:
    first = requests_of_step(5)
    epoch_order.cache_clear()  # as in a process that has just begun
    assert requests_of_step(5) == first


def test_steps_and_seeds_differ() -> None:
    seeds = [request.seed for step in range(10) for request in requests_of_step(step)]
    assert len(set(seeds)) == len(seeds)
    other = replace(CONFIG, seed=8)
    assert [request.seed for request in requests_of_step(0)] != [
        request.seed for request in requests_of_step(0, other)
    ]
    assert epoch_order(TASKS, None, 7, 0) != epoch_order(TASKS, None, 8, 0)


def test_rollouts_have_to_be_sampled_by_the_published_version() -> None:
    assert {request.min_version for request in requests_of_step(6)} == {6}


def test_every_epoch_plays_each_task_once_in_an_order_of_its_own() -> None:
    steps = [requests_of_step(step) for step in range(10)]  # 40 groups are 4 epochs; steps straddle them
    played = [request.task["question"] for requests in steps for request in requests[::3]]
    epochs = [played[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(task["question"] for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_evaluations_play_the_same_tasks_with_the_same_seeds() -> None:
    first = evaluation_requests(CONFIG, TASKS, 0, 1)
    later = evaluation_requests(CONFIG, TASKS, 9, 10)
    assert [(each.task, each.seed) for each in first] == [(each.task, each.seed) for each in later]
    assert not {each.rollout_id for each in first} & {each.rollout_id for each in later}
    assert {each.min_version for each in later} == {10}


def test_evaluations_sample_in_their_own_way_where_they_have_one() -> None:
    plain = evaluation_requests(CONFIG, TASKS, 0, 1)
    assert {each.params for each in plain} == {SamplingParams(temperature=0.7)}
    own = replace(CONFIG, evaluation=replace(CONFIG.evaluation, temperature=0.0, top_p=0.9))
    assert {each.params for each in evaluation_requests(own, TASKS, 0, 1)} == {
        SamplingParams(temperature=0.0, top_p=0.9)
    }
    assert {each.params.top_p for each in requests_of_step(0, own)} == {1.0}


def test_evaluations_go_first() -> None:
    assert all(request.urgent for request in evaluation_requests(CONFIG, TASKS, 0, 1))
    assert not any(request.urgent for request in requests_of_step(0))


def test_greedy_rollout_goes_with_its_group() -> None:
    requests = group_requests(CONFIG, TASKS[0], True, 5, 2)
    assert [request.params.temperature for request in requests] == [0.7, 0.7, 0.7, 0.0]
    assert requests[-1].rollout_id == "00000005/greedy"
    assert requests[:-1] == group_requests(CONFIG, TASKS[0], False, 5, 2)


def test_weights_say_how_often_a_task_is_played() -> None:
    tasks = Dataset([{"question": str(index), "weight": index % 3} for index in range(10)])
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, task_weights="weight", group_size=2))
    played = [request.task for step in range(200) for request in requests_of_step(step, config, tasks)[::2]]
    shares = [sum(task["weight"] == weight for task in played) / len(played) for weight in range(3)]
    # Four tasks weigh 0, three weigh 1, three weigh 2; 800 draws have a standard deviation of 0.017.
    assert shares[0] == 0
    assert shares[1] == pytest.approx(3 / 9, abs=0.07)
    assert requests_of_step(7, config, tasks) == requests_of_step(7, config, tasks)


@pytest.mark.parametrize(("wanted", "played"), [(4, 4), (200, 10)])
def test_evaluation_plays_what_is_asked_for_or_all_there_is(wanted: int, played: int) -> None:
    config = TrainConfig()
    config.evaluation.num_tasks = wanted
    assert len(evaluation_requests(config, TASKS, 0, 0)) == played


def test_derived_seeds_fit_where_a_turn_is_added_to_them() -> None:
    seeds = [derived_seed(0, str(index)) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_digest_of_tasks_tells_runs_apart_that_play_others() -> None:
    digest = tasks_digest(CONFIG, TASKS)
    assert digest == tasks_digest(replace(CONFIG, run=replace(CONFIG.run, num_steps=3)), TASKS)
    assert digest != tasks_digest(replace(CONFIG, seed=8), TASKS)
    assert digest != tasks_digest(CONFIG, TASKS[:9])
    warmer = replace(CONFIG.rollout, temperature=2.0)
    assert digest != tasks_digest(replace(CONFIG, rollout=warmer), TASKS)


class CountedTasks(Dataset):
    """Counts how often all tasks are read."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        return super().__iter__()


def test_order_of_an_epoch_is_made_once() -> None:
    """With 400,000 tasks it took 48 ms of CPU time for every group."""
    tasks = CountedTasks([{"weight": index % 3} for index in range(10)])
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, task_weights="weight"))
    tasks.num_passes = 0
    for number in range(5):
        task_index(config, tasks, number, {})
    assert tasks.num_passes == 1
