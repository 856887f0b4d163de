"""Curricula by themselves: weights by results, the floor below them, and errors of their arguments."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import Dataset, Trajectory
from environments.data.curriculum import Curriculum, Levels, RewardVariance, SuccessBand
from environments.errors import ConfigError, DatasetError

TASKS = Dataset([{"name": name, "level": level} for name, level in zip("abcdef", "eemmhh", strict=True)])
MAKERS: list[Callable[[], Curriculum]] = [
    SuccessBand,
    RewardVariance,
    lambda: SuccessBand(by="level", memory=0.9),
    lambda: Levels(by="level", order=("e", "m", "h")),
]


def group(*rewards: float) -> list[Trajectory]:
    return [Trajectory(reward=reward) for reward in rewards]


def shares(curriculum: Curriculum, tasks: Dataset = TASKS, num_groups: int = 6000) -> list[float]:
    """The share of the groups that each task plays; the standard deviation is below 0.007."""
    turns = itertools.cycle(range(len(tasks)))
    chosen = Counter(curriculum.select(tasks, turns, random.Random(number)) for number in range(num_groups))
    return [chosen[index] / num_groups for index in range(len(tasks))]


def weights(curriculum: Curriculum) -> list[float]:
    return [curriculum.weight(curriculum.key(task)) for task in TASKS]


@pytest.mark.parametrize("make", MAKERS[:3])
def test_tasks_without_results_are_played_in_their_turn(make: Callable[[], Curriculum]) -> None:
    turns = itertools.cycle(range(len(TASKS)))
    assert [make().select(TASKS, turns, random.Random(seed)) for seed in range(9)] == [*range(6), 0, 1, 2]


def test_band_plays_what_lies_in_it_and_the_rest_by_the_floor() -> None:
    curriculum = SuccessBand(low=0.25, high=0.75, floor=0.2)
    for task, rewards in zip(TASKS[:3], [(0, 0, 0, 0), (0, 1, 0, 0), (1, 1, 1, 1)], strict=True):
        curriculum.observe(task, group(*rewards))
    assert weights(curriculum) == [0, 1, 0, 1, 1, 1]
    assert shares(curriculum) == pytest.approx([each / 4.4 for each in (0.2, 1, 0.2, 1, 1, 1)], abs=0.03)


def test_task_that_came_into_reach_is_found_again() -> None:
    curriculum = SuccessBand()
    curriculum.observe(TASKS[0], group(0, 0, 0, 0))
    assert weights(curriculum)[0] == 0
    curriculum.observe(TASKS[0], group(0, 1, 1, 0))
    assert curriculum.state[curriculum.key(TASKS[0])]["success"] == 0.25
    assert weights(curriculum)[0] == 1


def test_variance_plays_more_often_what_varies_more() -> None:
    curriculum = RewardVariance(floor=0.01)
    for task, rewards in zip(TASKS, [(0, 1), (0, 0, 0, 1), (1, 1), (0, 0), (0.5, 0.5), (-9, 9)], strict=True):
        curriculum.observe(task, group(*rewards))
    assert weights(curriculum) == pytest.approx([1, 0.75, 0, 0, 0, 1])
    assert RewardVariance(largest=1.0).largest == 1.0
    found = shares(curriculum)
    assert found[0] > found[1] > 0.2 and 0 < max(found[2:5]) < 0.02


def test_levels_follow_each_other_and_return_when_success_falls() -> None:
    curriculum = Levels(by="level", order=("e", "m", "h"), groups=3, memory=0.5)
    found = [curriculum.present]
    for task, reward in [("a", 1), ("b", 1), ("a", 1), ("c", 1), ("c", 1), ("d", 1), ("b", 0)]:
        index = "abcdef".index(task)
        curriculum.observe(TASKS[index], group(reward, reward))
        found.append(curriculum.present)
    assert found == [0, 0, 0, 1, 1, 1, 2, 0]
    assert weights(curriculum) == [1, 1, 0, 0, 0, 0]
    assert curriculum.metrics()["level"] == 0


def test_last_level_stays_when_all_are_mastered() -> None:
    curriculum = Levels(by="level", order=("e", "m"), groups=1)
    for task in TASKS[:4]:
        curriculum.observe(task, group(1))
    assert curriculum.present == 1


def test_tasks_of_one_field_share_results() -> None:
    curriculum = SuccessBand(by="level")
    curriculum.observe(TASKS[0], group(0, 0))
    assert weights(curriculum) == [0, 0, 1, 1, 1, 1]
    assert list(curriculum.state) == ["e"]


@pytest.mark.parametrize("make", MAKERS)
def test_every_task_stays_within_reach(make: Callable[[], Curriculum]) -> None:
    """Whatever was seen: all failed, all succeeded, or nothing."""
    for reward, num_known in itertools.product((0.0, 1.0, float("nan")), (0, 5, 6)):
        curriculum = make()
        for task in TASKS[:num_known]:
            for _ in range(9):
                curriculum.observe(task, group(reward, reward))
        assert min(shares(curriculum, num_groups=600)) > 0.1 / 6 / 2


@given(
    which=st.sampled_from(MAKERS),
    before=st.lists(st.tuples(st.integers(0, 5), st.lists(st.floats(-2, 2), min_size=1, max_size=4))),
    after=st.lists(st.tuples(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=4))),
)
@settings(max_examples=60, deadline=None)
def test_curriculum_goes_on_from_its_state_as_if_never_stopped(
    which: Callable[[], Curriculum],
    before: Sequence[tuple[int, list[float]]],
    after: Sequence[tuple[int, list[bool]]],
) -> None:
    first, resumed = which(), which()
    for index, rewards in before:
        first.observe(TASKS[index], group(*rewards))
    resumed.state = json.loads(json.dumps(first.state))
    for index, successes in after:
        for each in (first, resumed):
            each.observe(TASKS[index], group(*map(float, successes)))
    assert first.state == resumed.state
    assert first.metrics() == resumed.metrics()
    assert shares(first, num_groups=50) == shares(resumed, num_groups=50)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuccessBand(low=0.9, high=0.1), r"SuccessBand\(low=0.9, high=0.1\)"),
        (lambda: SuccessBand(floor=0.0), "floor=0.0"),
        (lambda: RewardVariance(floor=1.5), "floor=1.5"),
        (lambda: RewardVariance(memory=1.0), "memory=1.0"),
        (lambda: RewardVariance(largest=0), "largest=0"),
        (lambda: Levels(by="level", order=()), r"order=\(\)"),
        (lambda: Levels(by="level", order=(1, "1")), "each once"),
        (lambda: Levels(by="level", order="eh", success=2), "success=2"),
        (lambda: Levels(by="level", order="eh", groups=0), "groups=0"),
    ],
)
def test_arguments_out_of_bounds_are_named(make: Callable[[], Curriculum], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_tasks_that_cannot_be_placed_are_named() -> None:
    with pytest.raises(DatasetError, match=r"field 'kind', and task 0 has none.*'name', 'level'"):
        SuccessBand(by="kind").check(TASKS)
    with pytest.raises(DatasetError, match=r"Task 4 has level='h', which is none of the levels"):
        Levels(by="level", order=("e", "m")).check(TASKS)
    for make in MAKERS:
        make().check(TASKS)
