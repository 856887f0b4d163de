"""What an update is made of: the groups that are taken, those that are not, and their mini-batches."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayError
from test_group_scheduler import FakeStream, make_requests

from environments.errors import TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.config import SelectionConfig, TrainConfig
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import Progress
from launch.training.group_scheduler import GroupScheduler
from launch.training.loop import disagreement, make_batches, select_groups
from launch.training.rollout_requests import group_name
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


class FakeScheduler:
    def __init__(self, groups: list[TrajectoryGroup]) -> None:
        self._groups = list(groups)
        self.num_dropped = 0

    def take(self) -> TrajectoryGroup:
        return self._groups.pop(0)

    def drop(self) -> None:
        self.num_dropped += 1


class FakeTracker:
    def __init__(self) -> None:
        self.said: list[str] = []

    def announce(self, text: str) -> None:
        self.said.append(text)

    failures = Tracker.failures


@dataclass
class FakeRun:
    feed: FakeScheduler
    algorithm: object = REFILL
    progress: Progress = field(default_factory=Progress)
    tracker: FakeTracker = field(default_factory=FakeTracker)
    ordered: list[int] = field(default_factory=list)
    learner: Any = None
    probe: Any = None

    def request_rollouts(self, num_selected: int = 0) -> None:
        self.ordered.append(num_selected)


def config(**selection: object) -> TrainConfig:
    config = TrainConfig(selection=SelectionConfig(**selection))
    config.rollout.groups_per_step, config.rollout.group_size = 2, 2
    return config


def test_another_group_takes_the_place_of_one_that_is_dropped() -> None:
    run = FakeRun(FakeScheduler([group(0, [1, 1]), group(1, [0, 1]), group(2, [0, 0]), group(3, [1, 0])]))
    selection = select_groups(config(), run)
    assert [each.group_id for each in selection.groups] == [group_name(1), group_name(3)]
    assert [each.group_id for each in selection.dropped["zero_signal"]] == [group_name(0), group_name(2)]
    assert run.feed.num_dropped == 2
    assert run.ordered == [0, 1], "as soon as a slot is free, knowing what is there already"


def test_an_update_makes_do_with_what_it_has_rather_than_wait_for_ever() -> None:
    run = FakeRun(FakeScheduler([group(0, [0, 1]), *(group(number, [1, 1]) for number in range(1, 9))]))
    selection = select_groups(config(max_dropped=3), run)
    assert [each.group_id for each in selection.groups] == [group_name(0)]
    assert len(selection.all_dropped) == 4
    assert "makes do with 1 of 2 groups" in run.tracker.said[0]


def test_a_run_in_which_everything_fails_ends_with_the_error() -> None:
    run = FakeRun(FakeScheduler([group(number, [0, 0], "crashed") for number in range(9)]))
    with pytest.raises(TroupeError, match=r"All of 4 rollouts failed.*the disk is full"):
        select_groups(config(), run)


@pytest.mark.parametrize("reason", ["agent_error", "timeout"])
@pytest.mark.parametrize("algorithm", [GRPO, REFILL])
def test_a_run_in_which_no_rollout_comes_to_its_end_is_ended(reason: str, algorithm: object) -> None:
    groups = [group(number, [0, 0], reason) for number in range(9)]
    with pytest.raises(TroupeError, match=r"All of 4 rollouts failed"):
        select_groups(config(), FakeRun(FakeScheduler(groups), algorithm))


def test_single_failures_are_announced_and_cost_their_group_only() -> None:
    run = FakeRun(FakeScheduler([group(0, [0, 1]), group(1, [0, 0], "crashed"), group(2, [1, 0])]))
    selection = select_groups(config(), run)
    assert len(selection.groups) == 2 and len(selection.dropped["too_few_members"]) == 1
    assert run.tracker.said == ["2 of 6 rollouts failed, the first with: the disk is full"]


def test_groups_without_a_signal_are_left_out_and_counted_or_kept() -> None:
    groups = [group(0, [0, 1]), group(1, [1, 1])]
    left_out = select_groups(config(), FakeRun(FakeScheduler(groups), DROP))
    assert [each.group_id for each in left_out.groups] == [group_name(0), group_name(1)]
    assert [each.group_id for each in left_out.useful] == [group_name(0)]
    assert [each.group_id for each in left_out.unused["zero_signal"]] == [group_name(1)]
    assert len(select_groups(config(), FakeRun(FakeScheduler(groups), GRPO)).useful) == 2


def test_mini_batches_hold_every_trajectory_once() -> None:
    groups = [group(0, [0, 1, 0]), group(2, [1, 0, 0])]
    settings = TrainConfig()
    settings.learner.mini_batch_size = 3
    batches = make_batches(settings, groups, step=4)
    assert [len(batch.samples) for batch in batches] == [3, 3]
    ids = [sample.sample_id for batch in batches for sample in batch.samples]
    assert sorted(ids) == [f"{group_name(number)}/{index:04d}#0" for number in (0, 2) for index in range(3)]
    assert ids != sorted(ids), "they are shuffled"
    assert batches == make_batches(settings, groups, step=4)


def test_without_groups_there_is_no_mini_batch() -> None:
    assert make_batches(TrainConfig(), [], step=0) == []


@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "zero_signal_share"), [(128, 0, 0.5), (128, 1, 0.5), (64, 0, 0.6)]
)
def test_updates_that_make_do_leave_nothing_behind_that_grows_stale(
    groups_per_step: int, max_staleness: int, zero_signal_share: float
) -> None:
    rng = random.Random(0)

    class Stream(FakeStream):
        def take(self, group_id: str) -> TrajectoryGroup:
            taken = super().take(group_id)
            silent = rng.random() < zero_signal_share
            for index, each in enumerate(taken.trajectories):
                each.reward = each.steps[0].reward = 1.0 if silent else float(index == 0)
                each.termination_reason = TerminationReason.ENV_DONE
            return taken

    settings = config()
    settings.rollout.groups_per_step, settings.rollout.max_staleness = groups_per_step, max_staleness
    num_steps = 8
    feed = GroupScheduler(Stream(), make_requests, (max_staleness + 1) * groups_per_step, first=0)
    run = FakeRun(feed)

    def request_rollouts(num_selected: int = 0) -> None:
        left = (num_steps - run.progress.step) * groups_per_step
        feed.fill(run.progress.version, left - num_selected)

    run.request_rollouts = request_rollouts
    run.request_rollouts()
    for _ in range(num_steps):
        selection = select_groups(settings, run)
        assert not selection.dropped["stale"]
        assert len(selection.groups) > groups_per_step / 2
        run.progress.step += 1
        run.progress.version += 1
        feed.commit()
        run.request_rollouts()


# -- engine and learner --------------------------------------------------------------------------------


class FakeLearner:
    """Gives every token the log-probability -1."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        self.asked += [each.sample_id for each in batch.samples]
        return [[-1.0] * len(each.response_ids) for each in batch.samples]


class FakeProbe:
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


def compared(probe: FakeProbe, *samples: TrainingSample, bypass: bool = False) -> tuple[float, FakeRun]:
    """The difference that is found under version 3, and the run."""
    algorithm, progress = replace(GRPO, bypass=bypass), Progress(version=3)
    run = FakeRun(FakeScheduler([]), algorithm, progress, learner=FakeLearner(), probe=probe)
    numbers = disagreement(config(), run, [TrainBatch(samples=samples)])
    return numbers.get("learn/fresh_logprob_diff_mean", -1.0), run


def test_what_is_trained_on_is_compared_where_the_newest_version_has_sampled_it() -> None:
    difference, run = compared(
        FakeProbe(sampled("probe", 3)), sampled("new", 3, -1.25), sampled("old", 2, -9)
    )
    assert difference == 0.25
    assert run.learner.asked == []


def test_the_probe_is_compared_where_nothing_that_is_trained_on_is_fresh() -> None:
    difference, run = compared(FakeProbe(sampled("probe", 3)), sampled("old", 2, -9))
    assert difference == 0.5
    assert run.learner.asked == ["probe"]
    assert compared(FakeProbe())[0] == -1


def test_in_bypass_mode_the_learner_is_asked_for_its_own_log_probabilities() -> None:
    difference, run = compared(FakeProbe(), sampled("new", 3, -1.5), sampled("old", 2, -9), bypass=True)
    assert difference == 0.5
    assert run.learner.asked == ["new"]
    assert compared(FakeProbe(sampled("probe", 3)), sampled("old", 2, -9), bypass=True)[0] == 0.5


def test_a_probe_that_fails_is_reported_and_training_goes_on() -> None:
    difference, run = compared(FakeProbe(error=GetTimeoutError("No engine answers.")), sampled("old", 2, -9))
    assert difference == -1
    assert run.tracker.said == ["Engine and learner were not compared under version 3: No engine answers."]
