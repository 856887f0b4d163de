"""Every request is answered exactly once, whatever its environment does to the process that it runs in."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from called_by_part import call_by_part

from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from environments.base import BaseEnv
from environments.types import TerminationReason, Trajectory
from policies import GameAgent
from policies.sampler import ScriptedSampler

NUM_ACTORS = 3
RETRIES = 1
TIMEOUT_SECONDS = 15.0
"""Time for a rollout that hangs; all others have to be over before, on a busy machine too."""


class UnrulyEnv(BaseEnv):
    """Does in its first step what ``mode`` says; ``scratch`` is a file that survives the process."""

    def __init__(self, mode: str, scratch: str) -> None:
        self.mode, self.scratch = mode, Path(scratch)

    def reset(self) -> tuple[dict, dict]:
        return {"question": "?"}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        if self.mode == "raise":
            raise RuntimeError("on purpose")
        if self.mode == "hang":
            time.sleep(1000)
        if self.mode == "exit":
            os._exit(1)
        if self.mode == "quit":
            sys.exit(1)
        if self.mode == "exit once" and not self.scratch.exists():
            self.scratch.write_text("was here")
            os._exit(1)
        return "", 1.0, True, {}

    def close(self) -> None:
        self.scratch.with_suffix(".closed").touch()

    @staticmethod
    def from_dict(info: dict) -> UnrulyEnv:
        return UnrulyEnv(info["mode"], info["scratch"])


@pytest.fixture(scope="module")
def stream(ray_cluster: None) -> Iterator[TrajectoryStream]:
    """Room for two: the fleet has to wait for its consumer."""
    stream = TrajectoryStream(capacity=2)
    yield stream
    stream.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["a process each", "two an actor, by a part"])
def fleet(stream: TrajectoryStream, request: pytest.FixtureRequest) -> Iterator[Any]:
    sampler = SamplerActor.remote(partial(ScriptedSampler, ["a reply"]))
    fleet = RolloutFleet.remote(
        Pair(agent_class=GameAgent, env_class=UnrulyEnv),
        sampler,
        stream.queue,
        RolloutLimits(timeout_seconds=TIMEOUT_SECONDS),
        FleetConfig(num_actors=NUM_ACTORS, retries=RETRIES, pairs_per_actor=request.param),
    )
    if request.param > 1:
        call_by_part(fleet)
    stream.connect(fleet)
    ray.get(fleet.resize.remote(NUM_ACTORS))
    yield fleet
    ray.kill(fleet)


def play(fleet: Any, stream: TrajectoryStream, group_id: str, tasks: list[dict]) -> list[Trajectory]:
    """The trajectories of one group, in the order of its tasks."""
    requests = [
        RolloutRequest(rollout_id=f"{group_id}/{index}", group_id=group_id, task=task)
        for index, task in enumerate(tasks)
    ]
    (group,) = stream.groups(requests)
    assert [each.rollout_id for each in group.trajectories] == [request.rollout_id for request in requests]
    assert [each.task for each in group.trajectories] == tasks
    return list(group.trajectories)


def task(mode: str, folder: Path) -> dict:
    return {"mode": mode, "scratch": str(folder / mode)}


def test_every_request_is_answered_once_with_its_own_ending(
    fleet: Any, stream: TrajectoryStream, tmp_path: Path
) -> None:
    modes = ["fine", "raise", "hang", "exit", "quit", "exit once", "fine"]
    trajectories = play(fleet, stream, "unruly", [task(mode, tmp_path) for mode in modes])
    assert [each.termination_reason for each in trajectories] == [
        TerminationReason.ENV_DONE,
        TerminationReason.ENV_ERROR,
        TerminationReason.TIMEOUT,
        TerminationReason.CRASHED,
        TerminationReason.CRASHED,
        TerminationReason.ENV_DONE,
        TerminationReason.ENV_DONE,
    ]
    fine, raised, hung, exited, quitted, recovered, _ = trajectories
    assert fine.reward == recovered.reward == 1.0
    assert "raised in UnrulyEnv.step: RuntimeError: on purpose" in str(raised.error)
    assert "longer than its limit of 15 s" in str(hung.error) and "time.sleep(1000)" in str(hung.error)
    assert [step.model_response for step in hung.steps] == ["a reply"]
    for each in (raised, exited, quitted):
        assert str(each.error).endswith(f"(after {RETRIES + 1} attempts)")
    assert recovered.error is None
    assert {path.stem for path in tmp_path.glob("*.closed")} >= {"fine", "raise", "hang", "exit once"}
    status = ray.get(fleet.status.remote())
    assert (status.num_actors, status.num_waiting, status.num_running) == (NUM_ACTORS, 0, 0)
    assert status.num_lost == 1 + 2 * (RETRIES + 1) + 1
    sampled = len("a reply") + 1  # "raise" and "quit" said what they had sampled, "exit" could not
    assert status.num_replayed_tokens == 2 * sampled * RETRIES
    assert ray.get(stream.queue.qsize.remote()) == 0


def test_later_requests_are_served_by_actors_that_came_instead(
    fleet: Any, stream: TrajectoryStream, tmp_path: Path
) -> None:
    play(fleet, stream, "before", [task(mode, tmp_path) for mode in ("exit", "exit", "exit")])
    trajectories = play(fleet, stream, "after", [task("fine", tmp_path)] * 8)
    assert {each.termination_reason for each in trajectories} == {TerminationReason.ENV_DONE}


def test_fleet_that_shrinks_answers_everything_all_the_same(
    fleet: Any, stream: TrajectoryStream, tmp_path: Path
) -> None:
    ray.get(fleet.resize.remote(1))
    play(fleet, stream, "small", [task("fine", tmp_path)] * 5)
    ray.get(fleet.resize.remote(NUM_ACTORS))
    play(fleet, stream, "large", [task("fine", tmp_path)] * 5)
    assert ray.get(fleet.status.remote()).num_actors == NUM_ACTORS


def test_fleet_that_shrinks_without_a_reader_loses_nothing(
    fleet: Any, stream: TrajectoryStream, tmp_path: Path
) -> None:
    num_requests = 80  # more than stream, fleet and actors can hold together
    requests = [
        RolloutRequest(rollout_id=f"full-{index}/0", group_id=f"full-{index}", task=task("fine", tmp_path))
        for index in range(num_requests)
    ]
    ray.get(fleet.submit.remote(requests))
    while ray.get(stream.queue.qsize.remote()) < 2 or ray.get(fleet.status.remote()).num_running < NUM_ACTORS:
        time.sleep(0.1)
    ray.get(fleet.resize.remote(1))
    delivered = [each.rollout_id for each in stream.trajectories(num_requests)]
    assert sorted(delivered) == sorted(request.rollout_id for request in requests)
    ray.get(fleet.resize.remote(NUM_ACTORS))


def test_fleet_that_is_gone_ends_the_wait(ray_cluster: None, tmp_path: Path) -> None:
    stream = TrajectoryStream(capacity=2)
    pair = Pair(agent_class=GameAgent, env_class=UnrulyEnv)
    fleet = RolloutFleet.remote(pair, None, stream.queue, RolloutLimits(), FleetConfig())
    requests = [RolloutRequest(rollout_id="0/0", group_id="0", task=task("fine", tmp_path))]
    stream.connect(fleet)
    stream.request(requests)
    ray.kill(fleet)
    with pytest.raises(ray.exceptions.RayActorError):
        stream.take("0")
    stream.close()
