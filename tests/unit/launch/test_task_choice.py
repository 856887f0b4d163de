"""Curricula in a run: exact at a resume, within the bound of staleness, and with tasks that come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_learner import EASY, IMPOSSIBLE, RIGHT, SimulatedTraining, mixture

from environments import Dataset, Trajectory
from environments.data.curriculum import Curriculum, Levels, RewardVariance, SuccessBand
from environments.errors import ConfigError, DatasetError, TroupeError
from launch.training.rollout_requests import task_index
from launch.validation.workload import check_curriculum
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

DROP = resolve(AlgorithmConfig(zero_signal_groups="drop"), 64)
REFILL = resolve(AlgorithmConfig(zero_signal_groups="refill"), 64)
TASKS = mixture(24)
MAKERS: list[Callable[[], Curriculum]] = [
    SuccessBand,
    lambda: RewardVariance(floor=0.05),
    lambda: Levels(by="kind", order=(EASY, RIGHT, IMPOSSIBLE)),
]


def played(folder: Path, num_updates: int, curriculum: Curriculum | None) -> SimulatedTraining:
    training = SimulatedTraining(folder, TASKS, curriculum, DROP)
    for _ in range(num_updates):
        training.update()
    return training


def test_run_without_curriculum_plays_tasks_as_before(tmp_path: Path) -> None:
    training = played(tmp_path, 6, None)
    expected = [task_index(training.config, TASKS, number, {}) for number in range(7 * 8)]
    assert training.stream.requested == expected
    progress = training.state.progress
    assert (progress.num_turns, progress.chosen_tasks, progress.curriculum) == (0, {}, {})
    assert training.metrics == {} and training.said == []
    assert len(progress.tasks_digest) == 64


def test_first_pass_is_that_of_run_without_curriculum(tmp_path: Path) -> None:
    training = played(tmp_path, 2, SuccessBand())
    assert training.stream.requested == [task_index(training.config, TASKS, each, {}) for each in range(24)]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("algorithm", [DROP, REFILL], ids=["drop", "refill"])
@given(stops=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), min_size=1, max_size=3))
@settings(max_examples=3, deadline=None)
def test_resumed_run_chooses_what_one_that_never_stopped_does(
    tmp_path_factory: pytest.TempPathFactory,
    make: Callable[[], Curriculum],
    algorithm: Algorithm,
    stops: list[tuple[int, int]],
) -> None:
    """Stops between two updates, and in the middle of one: after so many of its groups."""
    undisturbed = SimulatedTraining(tmp_path_factory.mktemp("run"), TASKS, make(), algorithm)
    folder = tmp_path_factory.mktemp("run")
    training = SimulatedTraining(folder, TASKS, make(), algorithm)
    updates = []
    for num_updates, num_taken in stops:
        for _ in range(num_updates):
            updates.append(consumed(training))
        training.stream.num_until_interrupt = num_taken
        with pytest.raises(KeyboardInterrupt):
            training.update()
        training.save()
        training = SimulatedTraining(folder, TASKS, make(), algorithm)
    updates += [consumed(training) for _ in range(4)]
    expected = [consumed(undisturbed) for _ in updates]
    assert updates == expected
    assert training.policy.weights == undisturbed.policy.weights
    assert replace(training.state.progress, run="") == replace(undisturbed.state.progress, run="")
    assert training.metrics == undisturbed.metrics


def consumed(training: SimulatedTraining) -> list[tuple[str, int, list[float]]]:
    """The groups of the next update: number, task and rewards."""
    groups = training.update().taken
    return [(each.group_id, each.task["task"], [one.reward for one in each.trajectories]) for each in groups]


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_no_group_grows_stale_and_none_is_lost(tmp_path: Path, max_staleness: int) -> None:
    training = SimulatedTraining(tmp_path, TASKS, SuccessBand(), REFILL, max_staleness=max_staleness)
    rng, numbers = random.Random(0), []
    for _ in range(12):
        if rng.random() < 0.5:  # the learner was lost: the update is made again
            training.rollouts.take()
            training.rollouts.put_back()
        selection = training.update()
        assert not selection.dropped["stale"]
        numbers += [int(each.group_id) for each in selection.taken]
        under_way = range(training.state.progress.num_groups, training.rollouts.num_requested)
        assert sorted(training.state.progress.chosen_tasks) == sorted(map(str, under_way))
    assert sorted(numbers) == list(range(len(numbers)))
    groups_known = sum(each["groups"] for each in training.state.progress.curriculum.values())
    assert groups_known == len(numbers), "each is observed once, also where its update was made again"


def test_tasks_set_aside_are_not_chosen(tmp_path: Path) -> None:
    training = SimulatedTraining(tmp_path, TASKS, SuccessBand(), DROP)
    training.state.progress.set_aside |= {str(index): 0 for index in range(3, 24)}
    training.stream.requested.clear()
    for _ in range(4):
        training.update()
    assert set(training.stream.requested) == {0, 1, 2}
    training.state.progress.set_aside |= {str(index): 0 for index in range(3)}
    with pytest.raises(TroupeError, match="All of 24 tasks failed everywhere"):
        training.update()


def test_new_tasks_keep_the_results_of_those_that_stayed(tmp_path: Path) -> None:
    training = played(tmp_path, 4, SuccessBand())
    training.stream.num_until_interrupt = 3
    with pytest.raises(KeyboardInterrupt):
        training.update()
    before = dict(training.state.progress.curriculum)
    training.save()
    curriculum, new = SuccessBand(), [{**task, "task": 30 + index} for index, task in enumerate(mixture(6))]
    training = SimulatedTraining(tmp_path, Dataset([*TASKS[12:], *new]), curriculum, DROP)
    assert len(before) == 24
    assert curriculum.state == before
    training.update()
    assert training.stream.num_played == 8 * 8, "what was finished of the old tasks is played again"


class InOrder(Curriculum):
    """One of a user's own, with a plan and a state of its own."""

    def select(self, tasks: Dataset, turns: Iterator[int], rng: random.Random) -> int:
        return int(self.state.get("seen", 0)) % len(tasks)

    def observe(self, task: Mapping[str, Any], rollouts: Sequence[Trajectory]) -> None:
        self.state["seen"] = self.state.get("seen", 0) + 1


def test_own_plan_keeps_its_state_when_tasks_change(tmp_path: Path) -> None:
    training = played(tmp_path, 2, InOrder())
    assert training.state.progress.curriculum == {"seen": 16}
    assert training.metrics["curriculum/weight_mean"] == 1
    training.save()
    training = SimulatedTraining(tmp_path, Dataset(TASKS[5:]), InOrder(), DROP)
    assert training.state.progress.curriculum == {"seen": 16}
    assert set(training.stream.requested) == {TASKS[5 + 16]["task"]}
    training.save()
    training = SimulatedTraining(tmp_path, TASKS, SuccessBand(), DROP)
    assert training.said[0].endswith("kept by InOrder.observe: Curriculum.observe begins anew.")
    training.update()
    assert training.metrics["curriculum/known"] == 8


def test_curriculum_may_come_to_a_run_and_leave_it(tmp_path: Path) -> None:
    for curriculum in (None, SuccessBand(), RewardVariance(), None):
        training = SimulatedTraining(tmp_path, TASKS, curriculum, DROP)
        known = len(training.state.progress.curriculum)
        for _ in range(2):
            training.update()
        assert len(training.state.progress.curriculum) >= known
        assert bool(training.state.progress.chosen_tasks) == (curriculum is not None)
        training.save()
    expected = [task_index(training.config, TASKS, number, {}) for number in range(48, 72)]
    assert training.stream.requested == expected


def test_metrics_show_what_was_chosen(tmp_path: Path) -> None:
    training = played(tmp_path, 6, SuccessBand())
    metrics = training.metrics
    assert metrics.keys() == {"curriculum/known", "curriculum/weight_mean", "curriculum/passes"}
    assert metrics["curriculum/known"] == 24
    assert 0.1 < metrics["curriculum/weight_mean"] < 0.9
    assert metrics["curriculum/passes"] > 2.5, "most turns of the third pass were passed over"
    assert training.said[0].startswith("Curriculum: SuccessBand(by=None, floor=0.1,")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DROP, REFILL], ids=["drop", "refill"])
def test_band_needs_seven_tenths_of_the_rollouts_at_most(tmp_path: Path, algorithm: Algorithm) -> None:
    """A third of the tasks is right: ``tests/benchmarks/curriculum.py`` has more seeds and strategies."""
    tasks, ratios = mixture(192), []
    for seed in range(3):
        without, with_band = (
            SimulatedTraining(tmp_path / f"{seed}-{name}", tasks, curriculum, algorithm, seed)
            for name, curriculum in (("none", None), ("band", SuccessBand()))
        )
        ratios.append(with_band.rollouts_until(0.85) / without.rollouts_until(0.85))
    assert fmean(ratios) < 0.7


def test_curricula_that_are_none_or_do_not_fit_are_named() -> None:
    check_curriculum(None, TASKS)
    check_curriculum(Levels(by="kind", order=(EASY, RIGHT, IMPOSSIBLE)), TASKS)
    with pytest.raises(ConfigError, match=r"curriculum=.*SuccessBand.*has to be an object of a class"):
        check_curriculum(SuccessBand, TASKS)
    with pytest.raises(DatasetError, match="task 0 has none"):
        check_curriculum(SuccessBand(by="topic"), TASKS)


def test_no_task_is_given_up(tmp_path: Path) -> None:
    training = played(tmp_path, 50, SuccessBand())
    counts = [training.stream.requested.count(index) for index in range(24)]
    assert min(counts) > 1, "also those that failed in all of their rollouts"
    assert min(counts) < max(counts) / 3
