"""Order in which a stream hands out groups, without a queue: trajectories come from a list."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from environments.types import Trajectory


class ListedStream(TrajectoryStream):
    """Gives the trajectories of these ids, one after the other."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self._left = list(rollout_ids)
        self._groups, self._complete, self._before_wait, self._judgement = {}, set(), None, None
        self.request([request(rollout_id) for rollout_id in sorted(rollout_ids)])

    def _send(self, requests: Sequence[RolloutRequest]) -> None:
        """Nothing to do: they are in the list already."""

    def _arrived(self, seconds: float) -> None:
        """Nothing lies in a queue."""

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
