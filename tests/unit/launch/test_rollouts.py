"""Groups come in their order, never older than allowed, and nothing is lost between two runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest
from simulated_rollouts import SimulatedPlan, SimulatedRun

from actors.rollouts.rollout import RolloutRequest
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from launch.run_folder.checkpoint import Progress, StreamState
from launch.settings.tree import RolloutConfig
from launch.training.rollout_requests import group_name
from launch.training.rollouts import Rollouts
from launch.training.task_plan import TaskPlan

GROUP_SIZE = 3


class FakeStream:
    """plays a request when it is taken, or before, with the version that is served at that moment."""

    def __init__(self) -> None:
        self.version = 0
        self.played: list[str] = []
        self._requests: dict[str, list[RolloutRequest]] = {}
        self._finished: dict[str, Trajectory] = {}

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        for request in requests:
            self._requests.setdefault(request.group_id, []).append(request)
        self._finished |= {trajectory.rollout_id: trajectory for trajectory in finished}

    def play(self, rollout_id: str) -> None:
        """The oldest version that is allowed answers: a server may be slow to load."""
        if rollout_id in self._finished:
            return
        (request,) = [each for each in self.waiting() if each.rollout_id == rollout_id]
        completion = Completion(text="", finish_reason="stop", policy_version=request.min_version)
        self._finished[rollout_id] = Trajectory(
            task=request.task, rollout_id=rollout_id, steps=[Step(completion=completion)]
        )
        self.played.append(rollout_id)

    def waiting(self) -> list[RolloutRequest]:
        return [
            request
            for requests in self._requests.values()
            for request in requests
            if request.rollout_id not in self._finished
        ]

    def num_groups(self) -> int:
        return len(self._requests)

    def take(self, *group_ids: str) -> TrajectoryGroup:
        group_id = group_ids[0]
        for request in self._requests[group_id]:
            self.play(request.rollout_id)
        requests = self._requests.pop(group_id)
        members = tuple(self._finished.pop(request.rollout_id) for request in requests)
        return TrajectoryGroup(group_id=group_id, task=members[0].task, trajectories=members)

    def finished(self) -> list[Trajectory]:
        return list(self._finished.values())


PLAN = cast(TaskPlan, SimulatedPlan(GROUP_SIZE))


def rollouts_of(
    stream: FakeStream, groups_per_step: int, num_updates: int, max_staleness: int = 0, **progress: int
) -> tuple[Rollouts, Progress]:
    """Rollouts in the order of the tasks, and the progress that they follow."""
    settings = RolloutConfig(groups_per_step=groups_per_step, max_staleness=max_staleness)
    at = Progress(**progress)
    return Rollouts(stream, PLAN, settings, at, num_updates), at


def oldest(group: TrajectoryGroup) -> int:
    return min(
        step.completion.policy_version
        for each in group.trajectories
        for step in each.steps
        if step.completion
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("dropped_share", [0.0, 0.4])
def test_no_group_is_older_than_allowed_and_none_is_left_over(
    max_staleness: int, dropped_share: float
) -> None:
    rng = random.Random(f"{max_staleness}/{dropped_share}")
    num_steps, per_step = 20, 4
    stream = FakeStream()
    rollouts, progress = rollouts_of(stream, per_step, num_steps, max_staleness)
    rollouts.begin(StreamState())
    trained, worst = [], 0
    for version in range(num_steps):
        kept: list[str] = []
        while len(kept) < per_step:
            group = rollouts.take()
            worst = max(worst, version - oldest(group))
            if random.Random(f"{dropped_share}/{group.group_id}").random() < dropped_share:
                rollouts.replace(len(kept))
            else:
                kept.append(group.group_id)
            if rng.random() < 0.1:  # the learner was lost: the update is made again
                rollouts.put_back()
                kept.clear()
        trained += kept
        progress.step, progress.version = version + 1, version + 1
        rollouts.commit()

    assert worst <= max_staleness
    assert dropped_share or worst == max_staleness, "the fleet is kept as busy as is allowed"
    assert trained == sorted(trained) and len(trained) == num_steps * per_step
    assert stream.num_groups() == 0, "nothing was ordered that nobody took"
    assert len(stream.played) == len(set(stream.played))


def test_slots_bound_what_is_under_way() -> None:
    stream = FakeStream()
    rollouts, _ = rollouts_of(stream, 2, 50, max_staleness=2)
    rollouts.begin(StreamState())
    rollouts.request()
    assert stream.num_groups() == 6
    rollouts.take()
    rollouts.request()
    assert stream.num_groups() == 5, "what is in training keeps its slot"
    rollouts.replace(0)
    assert stream.num_groups() == 6, "what is dropped does not"
    rollouts.commit()
    assert stream.num_groups() == 6


def test_groups_that_are_put_back_come_again_as_they_were() -> None:
    rollouts, _ = rollouts_of(FakeStream(), 3, 1)
    rollouts.begin(StreamState())
    taken = [rollouts.take() for _ in range(2)]
    rollouts.put_back()
    state = rollouts.state()
    assert {each.rollout_id for each in state.ready} == {
        each.rollout_id for one in taken for each in one.rollouts
    }
    assert [rollouts.take() for _ in range(2)] == taken
    assert rollouts.take().group_id == group_name(2)


def test_run_restored_anywhere_plays_only_the_rest() -> None:
    for num_taken in range(5):
        stream = FakeStream()
        rollouts, progress = rollouts_of(stream, 4, 1, num_groups=8, version=3)
        rollouts.begin(StreamState())
        for number in (9, 11):
            stream.play(f"{group_name(number)}/0001")
        for _ in range(num_taken):  # taken by an update that was interrupted
            rollouts.take()
        state = rollouts.state()
        everything = {each.rollout_id for number in range(8, 12) for each in PLAN.requests(number, 0)}
        assert {each.rollout_id for each in state.ready} | set(state.in_flight) == everything
        assert len(state.ready) + len(state.in_flight) == len(everything)
        assert progress.num_groups == 8, "what an interrupted update has taken is not behind us"

        later = FakeStream()
        resumed, _ = rollouts_of(later, 4, 1, num_groups=8, version=3)
        resumed.begin(state)
        assert {request.rollout_id for request in later.waiting()} == set(state.in_flight)
        groups = [resumed.take() for _ in range(4)]
        assert [group.group_id for group in groups] == [group_name(number) for number in range(8, 12)]
        assert set(later.played) == set(state.in_flight)


def test_dropped_group_of_interrupted_update_is_judged_again() -> None:
    rollouts, _ = rollouts_of(FakeStream(), 2, 1)
    rollouts.begin(StreamState())
    rollouts.take()
    rollouts.replace(0)  # a third group is under way, more than there are slots
    resumed, _ = rollouts_of(FakeStream(), 2, 1)
    resumed.begin(rollouts.state())
    assert [resumed.take().group_id for _ in range(3)] == [group_name(number) for number in range(3)]


def test_trajectories_of_an_evaluation_are_not_the_feeds() -> None:
    stream = FakeStream()
    stream.request([], [Trajectory(rollout_id="eval-3-000001/0000")])
    rollouts, _ = rollouts_of(stream, 1, 0)
    assert rollouts.state() == StreamState(ready=(), in_flight=())


def test_staleness_k_makes_a_run_up_to_k_plus_1_times_faster() -> None:
    in_turns, _ = SimulatedRun(max_staleness=0, num_updates=30).play("tasks")
    for max_staleness, least in ((1, 1.5), (2, 2.0)):
        seconds, _ = SimulatedRun(max_staleness, num_updates=30).play("tasks")
        assert least < in_turns / seconds <= max_staleness + 1
