"""Groups come in their order, never older than allowed, and nothing is lost between two runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from simulated_rollouts import SimulatedRun

from actors.rollouts.rollout import RolloutRequest
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from launch.run_folder.checkpoint import StreamState
from launch.training.group_order import TaskOrder
from launch.training.group_scheduler import GroupScheduler
from launch.training.rollout_requests import group_name

GROUP_SIZE = 3


class FakeStream:
    """plays a request when it is taken, or before, with the version that is served at that moment."""

    def __init__(self) -> None:
        self.version = 0
        self.played: list[str] = []
        self._requests: dict[str, list[RolloutRequest]] = {}
        self._finished: dict[str, Trajectory] = {}

    def request(self, requests: Sequence[RolloutRequest]) -> None:
        self.restore(requests, [])

    def restore(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory]) -> None:
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

    def put_back(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            self._requests[group.group_id] = make_requests(int(group.group_id), 0)
            self._finished |= {each.rollout_id: each for each in group.rollouts}

    def drain(self) -> None:
        """Nothing lies anywhere but here."""

    def finished(self) -> list[Trajectory]:
        return list(self._finished.values())


def make_requests(number: int, version: int) -> list[RolloutRequest]:
    name = group_name(number)
    return [
        RolloutRequest(rollout_id=f"{name}/{member}", group_id=name, task={}, min_version=version)
        for member in range(GROUP_SIZE)
    ]


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
    scheduler = GroupScheduler(stream, make_requests, TaskOrder(), (max_staleness + 1) * per_step, first=0)
    scheduler.fill(0, num_steps * per_step)
    trained, worst = [], 0
    for version in range(num_steps):
        kept: list[str] = []
        while len(kept) < per_step:
            group = scheduler.take(version)
            worst = max(worst, version - oldest(group))
            if random.Random(f"{dropped_share}/{group.group_id}").random() < dropped_share:
                scheduler.drop()
                scheduler.fill(version, (num_steps - version) * per_step - len(kept))
            else:
                kept.append(group.group_id)
            if rng.random() < 0.1:  # the learner was lost: the update is made again
                scheduler.put_back()
                kept.clear()
        trained += kept
        scheduler.commit()
        scheduler.fill(version + 1, (num_steps - version - 1) * per_step)

    assert worst <= max_staleness
    assert dropped_share or worst == max_staleness, "the fleet is kept as busy as is allowed"
    assert trained == sorted(trained) and len(trained) == num_steps * per_step
    assert stream.num_groups() == 0, "nothing was ordered that nobody took"
    assert len(stream.played) == len(set(stream.played))


def test_slots_bound_what_is_under_way() -> None:
    stream = FakeStream()
    scheduler = GroupScheduler(stream, make_requests, TaskOrder(), num_slots=6, first=0)
    scheduler.fill(0, 100)
    scheduler.fill(0, 100)
    assert stream.num_groups() == 6
    scheduler.take(0)
    scheduler.fill(0, 100)
    assert stream.num_groups() == 5, "what is in training keeps its slot"
    scheduler.drop()
    scheduler.fill(0, 100)
    assert stream.num_groups() == 6, "what is dropped does not"
    scheduler.commit()
    scheduler.fill(1, 100)
    assert stream.num_groups() == 6


def test_a_scheduler_that_is_restored_anywhere_plays_the_rest_and_only_the_rest() -> None:
    for num_taken in range(5):
        stream = FakeStream()
        scheduler = GroupScheduler(stream, make_requests, TaskOrder(), num_slots=4, first=8)
        scheduler.fill(3, 4)
        for number in (9, 11):
            stream.play(f"{group_name(number)}/1")
        for _ in range(num_taken):  # taken by an update that was interrupted
            scheduler.take(3)
        state = scheduler.state()
        everything = {request.rollout_id for number in range(8, 12) for request in make_requests(number, 0)}
        assert {each.rollout_id for each in state.ready} | set(state.in_flight) == everything
        assert len(state.ready) + len(state.in_flight) == len(everything)

        later = FakeStream()
        resumed = GroupScheduler(
            later, make_requests, TaskOrder(), num_slots=4, first=scheduler.num_committed
        )
        resumed.restore(state, version=3)
        resumed.fill(3, 4)
        assert {request.rollout_id for request in later.waiting()} == set(state.in_flight)
        groups = [resumed.take(3) for _ in range(4)]
        assert [group.group_id for group in groups] == [group_name(number) for number in range(8, 12)]
        assert set(later.played) == set(state.in_flight)


def test_a_dropped_group_of_an_interrupted_update_is_judged_again() -> None:
    stream = FakeStream()
    scheduler = GroupScheduler(stream, make_requests, TaskOrder(), num_slots=2, first=0)
    scheduler.fill(0, 2)
    scheduler.take(0)
    scheduler.drop()
    scheduler.fill(0, 2)  # a third group is under way, more than there are slots
    state = scheduler.state()
    resumed = GroupScheduler(
        FakeStream(), make_requests, TaskOrder(), num_slots=2, first=scheduler.num_committed
    )
    resumed.restore(state, version=0)
    assert [resumed.take(0).group_id for _ in range(3)] == [group_name(number) for number in range(3)]


def test_trajectories_of_an_evaluation_are_not_the_feeds() -> None:
    stream = FakeStream()
    stream.restore([], [Trajectory(rollout_id="eval-3-000001/0000")])
    scheduler = GroupScheduler(stream, make_requests, TaskOrder(), num_slots=1, first=0)
    assert scheduler.state() == StreamState(ready=(), in_flight=())


def test_a_staleness_of_k_makes_a_run_faster_but_at_most_k_plus_one_times() -> None:
    in_turns, _ = SimulatedRun(max_staleness=0, num_updates=30).play("tasks")
    for max_staleness, least in ((1, 1.5), (2, 2.0)):
        seconds, _ = SimulatedRun(max_staleness, num_updates=30).play("tasks")
        assert least < in_turns / seconds <= max_staleness + 1
