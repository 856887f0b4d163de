"""Order in which a stream hands out groups, without a queue: trajectories come from a list."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollouts import stream as streams
from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.stream import GroupJudgement, TrajectoryStream
from environments.rewards.base import GroupReward
from environments.types import Step, TerminationReason, Trajectory, TrajectoryGroup
from policies.learning.samples import is_judged

ENV_DONE = TerminationReason.ENV_DONE


class ListedStream(TrajectoryStream):
    """Gives the trajectories of these ids, one after the other."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self._left, self._taken = list(rollout_ids), deque()
        self._groups, self._complete, self._before_wait, self._judgement = {}, set(), None, None
        self.request([request(rollout_id) for rollout_id in sorted(rollout_ids)])

    def _send(self, requests: Sequence[RolloutRequest]) -> None:
        """Nothing to do: they are in the list already."""

    def _arrived(self, seconds: float) -> Trajectory | None:
        """Nothing lies in a queue."""
        return None

    def _next(self) -> Trajectory:
        return Trajectory(rollout_id=self._left.pop(0))


def request(rollout_id: str) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, group_id=rollout_id.partition("/")[0], task={})


def test_first_complete_group_is_taken_and_others_lose_nothing() -> None:
    stream = ListedStream(["a/0", "c/0", "c/1", "b/0", "b/1", "a/1"])
    assert stream.take("a", "b").group_id == "b", "c was complete before, and was not asked for"
    assert [each.rollout_id for each in stream.finished()] == ["a/0", "c/0", "c/1"]
    group = stream.take("a", "c")
    assert group.group_id == "c", "it is there, and nothing is waited for"
    assert stream.take("a").group_id == "a"
    assert stream.finished() == []


def test_of_several_that_are_complete_the_first_named_is_taken() -> None:
    stream = ListedStream(["a/0", "b/0", "c/0"])
    assert stream.take("c").group_id == "c"
    assert stream.take("b", "a").group_id == "b"


@pytest.mark.parametrize("names", [("b",), ("a", "b"), ()])
def test_group_that_was_never_requested_is_not_waited_for(names: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match=r"request\(\) comes first"):
        ListedStream(["a/0"]).take(*names)


def test_list_that_came_as_time_ran_out_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    names, clock = ["a/0", "b/0", "c/0"], count(step=0.9 * streams.DRAIN_SECONDS)
    lists = iter([[Trajectory(rollout_id=name) for name in names]])
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(
        streams, "start_actor", lambda *_, **__: SimpleNamespace(get=SimpleNamespace(remote=str))
    )
    monkeypatch.setattr(streams, "beside_driver", dict)
    monkeypatch.setattr(streams.ray, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(streams.ray, "get", lambda call: next(lists))
    stream = TrajectoryStream(4)
    stream._groups = {name[0]: {name: None} for name in names}
    assert [each.rollout_id for each in stream.finished()] == names


class InterruptedStream(ListedStream):
    """Counts what is sent, and fails once when ``left`` trajectories are still to come."""

    def __init__(self, rollout_ids: Sequence[str], left: int) -> None:
        self.sent: list[str] = []
        self._fails_at = left
        super().__init__([])
        self._left = list(rollout_ids)

    def _send(self, requests: Sequence[RolloutRequest]) -> None:
        self.sent += [each.rollout_id for each in requests]

    def _arrived(self, seconds: float) -> None:
        """Nothing lies in a queue."""

    def _next(self) -> Trajectory:
        if len(self._left) == self._fails_at:
            self._fails_at = -1
            raise RuntimeError("a learner rank has died")
        return super()._next()


def test_groups_requested_again_after_an_error_play_once() -> None:
    stream = InterruptedStream(["b/1", "a/0", "b/0", "a/1"], left=2)
    requests = [request(name) for name in ("a/0", "a/1", "b/0", "b/1")]
    with pytest.raises(RuntimeError, match="has died"):
        next(stream.groups(requests))
    assert [each.group_id for each in stream.groups(requests)] == ["b", "a"]
    assert stream.sent == ["a/0", "a/1", "b/0", "b/1"]


# -- groups that are compared --------------------------------------------------------------------------


class Compared(ListedStream):
    """Has groups compared; the trajectories that are left arrive one by one, in their order."""

    def __init__(self, rollout_ids: Sequence[str], reward: GroupReward) -> None:
        super().__init__(rollout_ids)
        self._judgement = GroupJudgement(reward)

    def _arrived(self, seconds: float) -> Trajectory | None:
        return self._next() if self._left else None

    def _next(self) -> Trajectory:
        rollout_id = self._left.pop(0)
        answer = Step(action=rollout_id)
        return Trajectory(task={}, rollout_id=rollout_id, steps=[answer], termination_reason=ENV_DONE)


class Waiting:
    """Prefers the last answer. A group's verdicts come when they are released; that of ``broken`` never."""

    concurrency = 2

    def __init__(self, *released: str, broken: str = "") -> None:
        self.begun: list[str] = []
        self.released = {name: threading.Event() for name in "abc"}
        for name in released:
            self.released[name].set()
        self.broken = broken

    def __call__(self, task_info: dict[str, Any], action: str) -> float:
        return 7.0

    def compare(self, task_info: dict[str, Any], actions: Sequence[str]) -> list[float]:
        name = actions[0][0]
        self.begun.append(name)
        assert self.released[name].wait(60)
        if name == self.broken:
            raise LookupError("no judge")
        return [float(each == max(actions)) for each in actions]


def rewards(group: TrajectoryGroup) -> list[float]:
    return [each.reward for each in group.trajectories]


IDS = ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]


def test_groups_are_compared_while_others_arrive() -> None:
    reward = Waiting("b", "c")
    stream = Compared(IDS, reward)
    taken = stream.take("a", "b", "c")
    assert taken.group_id in ("b", "c") and rewards(taken) == [0.0, 1.0], "it did not wait for a"
    reward.released["a"].set()
    assert rewards(stream.take("a")) == [0.0, 1.0]
    assert reward.begun[0] == "a" and sorted(reward.begun) == ["a", "b", "c"]


def test_fleet_that_dies_while_a_group_is_compared_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Waiting()
    stream = Compared(["a/0", "a/1"], reward)
    monkeypatch.setattr("actors.rollouts.stream.STREAM_POLL_SECONDS", 0.0)
    monkeypatch.setattr(stream, "_check_fleet", lambda: pytest.fail("The fleet has died."))
    with pytest.raises(pytest.fail.Exception, match="has died"):
        stream.take("a")
    reward.released["a"].set()


def test_no_more_groups_are_compared_at_once_than_allowed() -> None:
    reward = Waiting()
    stream = Compared(IDS, reward)
    for _ in range(4):
        stream.finished()
        assert stream._first_complete(["a"]) is None
    assert sorted(reward.begun) == ["a", "b"], "c waits for its turn"
    for event in reward.released.values():
        event.set()
    assert rewards(stream.take("c")) == [0.0, 1.0]


def test_group_whose_judge_fails_has_failed_as_a_whole() -> None:
    stream = Compared(IDS, Waiting("a", "b", "c", broken="b"))
    failed = stream.take("b")
    assert not any(map(is_judged, failed.trajectories)), "nothing is learned from a reward of nobody"
    assert all("LookupError: no judge" in str(each.error) for each in failed.trajectories)
    assert rewards(stream.take("a")) == rewards(stream.take("c")) == [0.0, 1.0]


def test_checkpoint_keeps_verdicts_that_a_resume_does_not_repeat() -> None:
    reward = Waiting("a", "c")
    stream = Compared(IDS, reward)
    assert stream.take("a").group_id == "a"
    while not any(each.reward for each in stream.finished()):  # c is judged, and nobody has taken it
        stream._first_complete(["b"])
    saved = pickle.loads(pickle.dumps(stream.finished()))
    again = Waiting("b")
    resumed = Compared([], again)
    resumed.request([request(each.rollout_id) for each in saved], saved)
    assert rewards(resumed.take("c")) == rewards(resumed.take("b")) == [0.0, 1.0]
    assert again.begun == ["b"]
    reward.released["b"].set()


def test_member_played_again_is_compared_with_those_that_were() -> None:
    stream = Compared(["a/0", "a/1"], Waiting("a"))
    first, second = stream.take("a").trajectories
    assert (first.reward, second.reward) == (0.0, 1.0)
    again = Waiting("a")
    resumed = Compared([], again)
    resumed._left = ["a/1"]  # as a checkpoint has it whose failed rollouts are played again
    resumed.request([request("a/0"), request("a/1")], [first])
    assert rewards(resumed.take("a")) == [0.0, 1.0] and again.begun == ["a"]


def test_member_without_a_turn_has_no_group_compared_again() -> None:
    stream = Compared(["a/0", "a/1"], Waiting("a"))
    silent = Trajectory(task={}, rollout_id="a/2", termination_reason=TerminationReason.PROMPT_TOO_LONG)
    saved = [*stream.take("a").trajectories, silent]
    again = Waiting("a")
    resumed = Compared([], again)
    resumed.request([request(each.rollout_id) for each in saved], saved)
    assert rewards(resumed.take("a")) == [0.0, 1.0, 0.0] and not again.begun


def test_group_of_one_is_judged_alone_and_by_the_stream() -> None:
    assert rewards(Compared(["a/0"], Waiting()).take("a")) == [7.0]
