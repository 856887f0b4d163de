"""In the order of completion nothing waits without need, grows too old, is lost or comes twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_rollouts import SimulatedPlan, SimulatedRun, SimulatedStream, log_normal

from environments.types import TrajectoryGroup
from launch.run_folder.checkpoint import Progress, StreamState
from launch.settings.tree import RolloutConfig
from launch.training.rollout_requests import group_name
from launch.training.rollouts import CompletionOrder, RequestedGroup, Rollouts, oldest_version
from launch.training.task_plan import TaskPlan


def requested(*versions: int) -> list[RequestedGroup]:
    return [RequestedGroup(number=number, version=version) for number, version in enumerate(versions)]


def numbers(groups: Sequence[RequestedGroup]) -> list[int]:
    return [each.number for each in groups]


@pytest.mark.parametrize(
    ("versions", "version", "num_used", "allowed"),
    [
        ([0, 0, 0, 0], 0, 0, [0, 1, 2, 3]),  # half of them can wait
        ([0, 0, 1, 1], 1, 0, [0, 1]),  # two are due, and there are two places
        ([0, 1, 1, 1], 1, 0, [0, 1, 2, 3]),  # one is due, and there are two places
        ([0, 1, 1, 1], 1, 1, [0]),  # one is left
        ([1, 1, 1], 1, 1, [0, 1, 2]),
    ],
)
def test_what_is_due_comes_first_when_no_other_place_is_left(
    versions: list[int], version: int, num_used: int, allowed: list[int]
) -> None:
    order = CompletionOrder(groups_per_step=2, max_staleness=1)
    assert numbers(order.candidates(requested(*versions), version, num_used)) == allowed


def test_places_of_later_updates_are_kept_for_what_is_due_then() -> None:
    order = CompletionOrder(groups_per_step=2, max_staleness=2)
    waiting = requested(0, 0, 0, 0, 1, 1)  # four are due in two updates, each of two places
    assert numbers(order.candidates(waiting, 1, 0)) == [0, 1, 2, 3]
    assert numbers(order.candidates(waiting[1:], 1, 0)) == [1, 2, 3, 4, 5]


def test_oldest_group_comes_first() -> None:
    waiting = requested(3, 2, 3, 2)
    assert numbers(CompletionOrder(9, 2).candidates(waiting, 3, 0)) == [1, 3, 0, 2]


# -- whole runs ------------------------------------------------------------------------------------------


@dataclass
class Script:
    """A run, and what happens to it."""

    seed: int
    max_staleness: int
    groups_per_step: int
    group_size: int
    num_actors: int
    num_updates: int
    sigma: float
    max_dropped: int
    dropped_share: float
    unpublished_share: float
    """Of the updates: they change nothing, so that the version stays."""
    interrupted_share: float
    """Of the takes: the learner is lost, or the run ends and is resumed."""


scripts = st.builds(
    Script,
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(1, 4),
    groups_per_step=st.integers(1, 5),
    group_size=st.integers(1, 3),
    num_actors=st.integers(1, 24),
    num_updates=st.integers(1, 14),
    sigma=st.sampled_from([0.3, 1.0, 2.0]),
    max_dropped=st.integers(1, 5),
    dropped_share=st.sampled_from([0.0, 0.2, 0.5]),
    unpublished_share=st.sampled_from([0.0, 0.3]),
    interrupted_share=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
)


@dataclass
class Run:
    """Plays a script, and checks at each step what has to hold."""

    script: Script
    progress: Progress = field(default_factory=Progress)
    consumed: list[str] = field(default_factory=list)
    was_interrupted: bool = False

    def __post_init__(self) -> None:
        self._rng = random.Random(self.script.seed)
        self._stream = self._new_stream(0.0)
        self._put_back: dict[str, TrajectoryGroup] = {}
        self._rollouts = self._new_rollouts()
        self._rollouts.begin(StreamState())

    def play(self) -> None:
        """Make all updates."""
        while self.progress.step < self.script.num_updates:
            groups = self._select()
            if groups is None:
                continue
            self.consumed += [each.group_id for each in groups]
            self._stream.seconds += 1.0
            self.progress.step += 1
            self.progress.version += self._rng.random() >= self.script.unpublished_share
            self._rollouts.commit()
        assert self._stream.num_groups() == 0, "nothing was requested that nobody took"
        assert sorted(self.consumed) == [group_name(number) for number in range(len(self.consumed))]
        assert self.progress.num_groups == len(self.consumed)

    def _select(self) -> list[TrajectoryGroup] | None:
        """The groups of an update, as ``select_groups`` takes them; ``None`` if it was interrupted."""
        wanted, most = self.script.groups_per_step, self.script.max_dropped
        taken: list[TrajectoryGroup] = []
        num_selected = num_replaced = 0
        while num_selected < wanted and len(taken) < wanted + most:
            if self._rng.random() < self.script.interrupted_share:
                self._interrupt(taken)
                return None
            taken.append(self._take(wanted - len(taken) + num_replaced))
            if random.Random(taken[-1].group_id).random() >= self.script.dropped_share:
                num_selected += 1
            elif len(taken) - num_selected <= most:
                num_replaced += 1
                self._rollouts.replace(num_selected)
        assert num_selected == wanted or len(taken) == wanted + most
        return taken

    def _take(self, num_left: int) -> TrajectoryGroup:
        before, version = self._stream.seconds, self.progress.version
        oldest = {name: int(min(map(oldest_version, each.rollouts))) for name, each in self._put_back.items()}
        complete, waiting = self._stream.complete() | set(oldest), self._stream.oldest_allowed() | oldest
        group = self._rollouts.take()
        self._put_back.pop(group.group_id, None)
        assert version - min(map(oldest_version, group.trajectories)) <= self.script.max_staleness
        # What an interrupted update has dropped is there again, besides as many groups as there are slots.
        if self._stream.seconds > before and not (self.was_interrupted and self.script.dropped_share):
            late = [each for each in complete if self._could_be_taken(each, waiting, num_left)]
            assert not late, "a group was waited for, though another was complete"
        return group

    def _could_be_taken(self, group_id: str, waiting: dict[str, int], num_left: int) -> bool:
        """Whether all the others can still be in time after it: by placing them one by one, oldest first."""
        places = [self.progress.version] * (num_left - 1)
        for ahead in range(1, self.script.max_staleness + 1):
            places += [self.progress.version + ahead] * self.script.groups_per_step
        others = sorted(oldest for name, oldest in waiting.items() if name != group_id)
        return len(others) <= len(places) and all(
            place <= oldest + self.script.max_staleness for place, oldest in zip(places, others, strict=False)
        )

    def _interrupt(self, taken: Sequence[TrajectoryGroup]) -> None:
        self.was_interrupted = True
        if self._rng.random() < 0.5:
            self._rollouts.put_back()
            self._put_back |= {each.group_id: each for each in taken}
            return
        state = self._rollouts.state()
        assert self.progress.num_groups == len(self.consumed), "what was taken meanwhile is not behind us"
        there = Counter([*(each.rollout_id for each in state.ready), *state.in_flight])
        assert set(there.values()) <= {1}
        assert not {rollout_id.partition("/")[0] for rollout_id in there} & set(self.consumed)
        self._stream, self._put_back = self._new_stream(self._stream.seconds), {}
        self._rollouts = self._new_rollouts()
        free = self._stream.num_sent
        self._rollouts.begin(state)
        sent = self._stream.num_sent - free - len(state.in_flight)
        assert sent % self.script.group_size == 0 and sent >= 0, "nothing that is ready is played again"

    def _new_stream(self, seconds: float) -> SimulatedStream:
        duration = partial(log_normal, self.script.seed, self.script.sigma)
        return SimulatedStream(self.script.num_actors, duration, seconds)

    def _new_rollouts(self) -> Rollouts:
        script = self.script
        rollout = RolloutConfig(
            groups_per_step=script.groups_per_step,
            max_staleness=script.max_staleness,
            group_order="completion",
        )
        return Rollouts(self._stream, plan_of(script.group_size), rollout, self.progress, script.num_updates)


def plan_of(group_size: int) -> TaskPlan:
    return cast(TaskPlan, SimulatedPlan(group_size))


@pytest.mark.slow
@settings(max_examples=300)
@given(scripts)
def test_run_takes_each_group_once_in_time_without_needless_wait(script: Script) -> None:
    Run(script).play()


def test_resumed_run_requests_no_taken_number_again() -> None:
    stream = SimulatedStream(4, lambda rollout_id: 50.0 if rollout_id.startswith(group_name(1)) else 1.0)
    order = RolloutConfig(groups_per_step=2, max_staleness=1, group_order="completion")
    progress = Progress()
    rollouts = Rollouts(stream, plan_of(1), order, progress, num_updates=4)
    rollouts.begin(StreamState())
    taken = [rollouts.take().group_id for _ in range(2)]
    assert taken == [group_name(0), group_name(2)]
    progress.step = progress.version = 1
    rollouts.commit()
    state = rollouts.state()
    assert [each.rollout_id for each in state.ready] == ["00000003/0000"]
    assert state.in_flight == ("00000001/0000", "00000004/0000", "00000005/0000")

    for resumed_state in (state, state.with_played_again(lambda _: True)):
        later = SimulatedStream(4, lambda rollout_id: 1.0)
        tasks = RolloutConfig(groups_per_step=2, max_staleness=1)  # the order may be another one now
        resumed = Rollouts(later, plan_of(1), tasks, Progress(step=1, version=1, num_groups=2), num_updates=4)
        resumed.begin(resumed_state)
        assert [resumed.take().group_id for _ in range(4)] == [group_name(each) for each in (1, 3, 4, 5)]


def test_nothing_is_restored_from_nothing() -> None:
    stream, progress = SimulatedStream(1, lambda rollout_id: 1.0), Progress(version=3, num_groups=7)
    rollouts = Rollouts(stream, plan_of(1), RolloutConfig(groups_per_step=1), progress, num_updates=0)
    rollouts.begin(StreamState())
    assert (progress.num_groups, rollouts.num_requested, stream.num_sent) == (7, 7, 0)


def test_completion_order_saves_time_where_groups_are_replaced() -> None:
    for replaced_share, least, most in ((0.0, 1.0, 1.1), (0.3, 1.1, 2.0)):
        run = SimulatedRun(max_staleness=2, replaced_share=replaced_share, num_updates=30)
        gain = run.play("tasks")[0] / run.play("completion")[0]
        assert least <= gain <= most
