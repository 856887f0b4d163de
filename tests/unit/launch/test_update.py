"""What an update is made of: the groups that are taken, those that are not, and their mini-batches."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import GetTimeoutError, RayError
from test_rollouts import FakeStream

from environments import Dataset, SingleTurnEnvironment
from environments.errors import TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import StreamState
from launch.settings.tree import SelectionConfig, TrainConfig
from launch.training.engine_comparison import EngineComparison
from launch.training.mini_batches import in_epochs, make_batches
from launch.training.rollout_requests import group_name
from launch.training.rollouts import Rollouts
from launch.training.run_state import RunState
from launch.training.selection import Selection, select_groups
from launch.training.task_plan import TaskPlan
from launch.workload import Workload
from policies.agents.game import GameAgent
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig

GRPO = resolve(AlgorithmConfig(), 64)
REFILL = resolve(AlgorithmConfig(zero_signal_groups="refill"), 64)
DROP = resolve(AlgorithmConfig(zero_signal_groups="drop"), 64)


def group(number: int, rewards: Iterable[float], reason: str = "env_done") -> TrajectoryGroup:
    name = group_name(number)
    completion = Completion(
        prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-0.5,), text="", finish_reason="stop"
    )
    return TrajectoryGroup(
        group_id=name,
        task={},
        trajectories=tuple(
            Trajectory(
                rollout_id=f"{name}/{index:04d}",
                reward=reward,
                steps=[Step(completion=completion, reward=reward)],
                termination_reason=TerminationReason(reason),
                error="the disk is full" if reason == "crashed" else None,
            )
            for index, reward in enumerate(rewards)
        ),
    )


class FakeRollouts:
    def __init__(self, groups: list[TrajectoryGroup]) -> None:
        self._groups = list(groups)
        self.replaced: list[int] = []

    def take(self) -> TrajectoryGroup:
        return self._groups.pop(0)

    def replace(self, num_selected: int) -> None:
        self.replaced.append(num_selected)


class FakeTracker:
    def __init__(self) -> None:
        self.said: list[str] = []

    def announce(self, text: str) -> None:
        self.said.append(text)

    failures = Tracker.failures


def selected(
    groups: list[TrajectoryGroup], algorithm: Algorithm = REFILL, **selection: object
) -> tuple[Selection, FakeRollouts, FakeTracker]:
    """The selection of version 0 from ``groups``, and what it has asked for and said."""
    rollouts, tracker = FakeRollouts(groups), FakeTracker()
    return select_groups(config(**selection), algorithm, rollouts, 0, tracker), rollouts, tracker


def config(**selection: object) -> TrainConfig:
    config = TrainConfig(selection=SelectionConfig(**selection))
    config.rollout.groups_per_step, config.rollout.group_size = 2, 2
    return config


def test_another_group_takes_the_place_of_one_that_is_dropped() -> None:
    groups = [group(0, [1, 1]), group(1, [0, 1]), group(2, [0, 0]), group(3, [1, 0])]
    selection, rollouts, _ = selected(groups)
    assert [each.group_id for each in selection.groups] == [group_name(1), group_name(3)]
    assert [each.group_id for each in selection.dropped["zero_signal"]] == [group_name(0), group_name(2)]
    assert rollouts.replaced == [0, 1], "as soon as a slot is free, knowing what is there already"


def test_update_makes_do_with_fewer_groups_than_wanted() -> None:
    groups = [group(0, [0, 1]), *(group(number, [1, 1]) for number in range(1, 9))]
    selection, _, tracker = selected(groups, max_dropped=3)
    assert [each.group_id for each in selection.groups] == [group_name(0)]
    assert len(selection.all_dropped) == 4
    assert "makes do with 1 of 2 groups" in tracker.said[0]


def test_run_in_which_everything_fails_ends_with_the_error() -> None:
    with pytest.raises(TroupeError, match=r"All of 8 rollouts failed.*the disk is full"):
        selected([group(number, [0, 0], "crashed") for number in range(9)])


def test_one_failing_task_ends_no_run_of_one_group_updates() -> None:
    settings, rollouts = config(), FakeRollouts([group(0, [0, 0], "crashed"), group(1, [0, 1])])
    settings.rollout.groups_per_step = 1
    selection = select_groups(settings, REFILL, rollouts, 0, FakeTracker())
    assert [each.group_id for each in selection.groups] == [group_name(1)]


@pytest.mark.parametrize("reason", ["agent_error", "timeout"])
@pytest.mark.parametrize("algorithm", [GRPO, REFILL])
def test_run_in_which_no_rollout_comes_to_its_end_is_ended(reason: str, algorithm: Algorithm) -> None:
    groups = [group(number, [0, 0], reason) for number in range(9)]
    with pytest.raises(TroupeError, match=r"All of [48] rollouts failed"):
        selected(groups, algorithm)


def test_single_failures_are_announced_and_cost_their_group_only() -> None:
    selection, _, tracker = selected([group(0, [0, 1]), group(1, [0, 0], "crashed"), group(2, [1, 0])])
    assert len(selection.groups) == 2 and len(selection.dropped["too_few_members"]) == 1
    assert tracker.said == ["2 of 6 rollouts failed, the first with: the disk is full"]


def test_groups_without_signal_are_left_out_and_counted_or_kept() -> None:
    groups = [group(0, [0, 1]), group(1, [1, 1])]
    left_out, _, _ = selected(groups, DROP)
    assert [each.group_id for each in left_out.groups] == [group_name(0), group_name(1)]
    assert [each.group_id for each in left_out.useful] == [group_name(0)]
    assert [each.group_id for each in left_out.unused["zero_signal"]] == [group_name(1)]
    assert len(selected(groups, GRPO)[0].useful) == 2


def test_mini_batches_hold_every_trajectory_once() -> None:
    groups = [group(0, [0, 1, 0]), group(2, [1, 0, 0])]
    rollouts = [each for group in groups for each in group.trajectories]
    settings = TrainConfig()
    settings.learner.mini_batch_size = 3
    batches = make_batches(settings, rollouts, "batches/4")
    assert [len(batch.samples) for batch in batches] == [3, 3]
    ids = [sample.sample_id for batch in batches for sample in batch.samples]
    assert sorted(ids) == [f"{group_name(number)}/{index:04d}#0" for number in (0, 2) for index in range(3)]
    assert ids != sorted(ids), "they are shuffled"
    assert batches == make_batches(settings, rollouts, "batches/4")


def test_without_groups_there_is_no_mini_batch() -> None:
    assert make_batches(TrainConfig(), [], "batches/0") == []
    assert in_epochs(epochs(2), [], "epochs/0") == []


def epochs(number: int) -> TrainConfig:
    config = TrainConfig()
    config.learner.num_epochs = number
    return config


def test_each_epoch_orders_the_same_mini_batches_anew() -> None:
    batches = [TrainBatch(samples=(), temperature=float(index)) for index in range(8)]
    assert in_epochs(TrainConfig(), batches, "epochs/4") == batches
    taken = in_epochs(epochs(3), batches, "epochs/4")
    passes = [taken[:8], taken[8:16], taken[16:]]
    assert passes[0] == batches
    for order in passes[1:]:
        assert sorted(each.temperature for each in order) == [each.temperature for each in batches]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert taken == in_epochs(epochs(3), batches, "epochs/4"), "a resumed run agrees"
    assert taken != in_epochs(epochs(3), batches, "epochs/5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "zero_signal_share"), [(128, 0, 0.5), (128, 1, 0.5), (64, 0, 0.6)]
)
def test_updates_that_make_do_leave_no_group_to_grow_stale(
    tmp_path: Path, groups_per_step: int, max_staleness: int, zero_signal_share: float
) -> None:
    rng = random.Random(0)

    class Stream(FakeStream):
        def take(self, *group_ids: str) -> TrajectoryGroup:
            taken = super().take(*group_ids)
            alike = rng.random() < zero_signal_share
            for index, each in enumerate(taken.trajectories):
                each.reward = each.steps[0].reward = 1.0 if alike else float(index == 0)
                each.termination_reason = TerminationReason.ENV_DONE
            return taken

    settings = config()
    settings.rollout.groups_per_step, settings.rollout.max_staleness = groups_per_step, max_staleness
    tracker, num_updates = FakeTracker(), 8
    tasks = Dataset([{"question": str(index)} for index in range(5)])
    workload = Workload(agent_class=GameAgent, env_class=SingleTurnEnvironment, train_dataset=tasks)
    state = RunState(settings, tmp_path)
    plan = TaskPlan(settings, workload, False, state, tracker)
    rollouts = Rollouts(Stream(), plan, settings.rollout, state.progress, num_updates)
    rollouts.begin(StreamState())
    for _ in range(num_updates):
        selection = select_groups(settings, REFILL, rollouts, state.progress.version, tracker)
        assert not selection.dropped["stale"]
        assert len(selection.groups) > groups_per_step / 2
        state.progress.step += 1
        state.progress.version += 1
        rollouts.commit()


# -- engine and learner --------------------------------------------------------------------------------


class FakeLearner:
    """Gives every token the log-probability -1."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        self.asked += [each.sample_id for each in batch.samples]
        return [[-1.0] * len(each.response_ids) for each in batch.samples]


class FakeProbe:
    policy = ""

    def __init__(self, *samples: TrainingSample, error: RayError | None = None) -> None:
        self._samples, self._error = samples, error

    def take(self, version: int) -> list[TrainingSample]:
        if self._error is not None:
            raise self._error
        return list(self._samples)


def sampled(sample_id: str, version: int, old: float | None = None, engine: float = -1.5) -> TrainingSample:
    return TrainingSample(
        sample_id=sample_id,
        prompt_ids=(1,),
        response_ids=(2, 3),
        loss_mask=(1, 1),
        rollout_logprobs=(engine, engine),
        old_logprobs=() if old is None else (old, old),
        policy_version=version,
    )


def compared(
    probe: FakeProbe, *samples: TrainingSample, bypass: bool = False
) -> tuple[float, FakeLearner, FakeTracker]:
    """The difference that is found under version 3, and the learner and the tracker then."""
    learner, tracker = FakeLearner(), FakeTracker()
    comparison = EngineComparison(config(), replace(GRPO, bypass=bypass), learner, probe, tracker.announce)
    numbers = comparison.before_update(3, [TrainBatch(samples=samples)])
    return numbers.get("learn/fresh_logprob_diff_mean", -1.0), learner, tracker


def test_trained_samples_of_newest_version_are_compared() -> None:
    difference, learner, _ = compared(
        FakeProbe(sampled("probe", 3)), sampled("new", 3, -1.25), sampled("old", 2, -9)
    )
    assert difference == 0.25
    assert learner.asked == []


def test_probe_is_compared_where_no_trained_sample_is_fresh() -> None:
    difference, learner, _ = compared(FakeProbe(sampled("probe", 3)), sampled("old", 2, -9))
    assert difference == 0.5
    assert learner.asked == ["probe"]
    assert compared(FakeProbe())[0] == -1


def test_bypass_mode_compares_the_learners_own_logprobs() -> None:
    difference, learner, _ = compared(
        FakeProbe(), sampled("new", 3, -1.5), sampled("old", 2, -9), bypass=True
    )
    assert difference == 0.5
    assert learner.asked == ["new"]
    assert compared(FakeProbe(sampled("probe", 3)), sampled("old", 2, -9), bypass=True)[0] == 0.5


def test_probe_that_fails_is_reported_and_training_goes_on() -> None:
    difference, _, tracker = compared(
        FakeProbe(error=GetTimeoutError("No engine answers.")), sampled("old", 2, -9)
    )
    assert difference == -1
    assert tracker.said == ["Engine and learner were not compared under version 3: No engine answers."]
