"""A process of the pipeline dies: its true error reaches whoever waits within seconds, or nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.rollouts import stream as rollout_stream
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from environments.base import BaseEnv
from environments.errors import TroupeError
from environments.types import TerminationReason, TrajectoryGroup
from policies import GameAgent
from policies.sampler import ScriptedSampler

NUM_ACTORS = 2
MOST_SECONDS = 45.0
"""Seconds from a death until the wait for it ends."""


class SlowEnv(BaseEnv):
    """Takes ``seconds`` for each of its two steps."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.num_steps = seconds, 0

    def reset(self) -> tuple[dict, dict]:
        return {"question": "?"}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        time.sleep(self.seconds)
        self.num_steps += 1
        return "", 1.0, self.num_steps == 2, {}

    @staticmethod
    def from_dict(info: dict) -> SlowEnv:
        return SlowEnv(info["seconds"])


def slow_to_start() -> ScriptedSampler:
    """As the real one, which loads a tokenizer and connects to Serve."""
    time.sleep(2)
    return ScriptedSampler(["one", "two"])


@dataclass
class Pipeline:
    """A fleet of ``NUM_ACTORS`` that samples a script, and the stream that it fills."""

    sampler: Any
    fleet: Any
    stream: TrajectoryStream

    def order(self, names: Sequence[str], seconds: float) -> None:
        """Order groups of one."""
        self.stream.request(
            [
                RolloutRequest(rollout_id=f"{name}/0", group_id=name, task={"seconds": seconds})
                for name in names
            ]
        )

    def play(self, num_groups: int, seconds: float) -> list[str]:
        """Order groups of one; return their ids when all actors are busy with the first of them."""
        names = [str(index) for index in range(num_groups)]
        self.order(names, seconds)
        while ray.get(self.fleet.status.remote()).num_running < NUM_ACTORS:
            time.sleep(0.05)
        return names

    def take(self, names: Sequence[str]) -> list[TrajectoryGroup]:
        return [self.stream.take(name) for name in names]


@pytest.fixture
def pipeline(ray_cluster: None) -> Iterator[Pipeline]:
    sampler = SamplerActor.remote(slow_to_start)
    stream = TrajectoryStream(capacity=4)
    pair = Pair(agent_class=GameAgent, env_class=SlowEnv)
    config = FleetConfig(num_actors=NUM_ACTORS, retries=0)
    fleet = RolloutFleet.remote(pair, sampler, stream.queue, RolloutLimits(), config)
    ray.get(fleet.resize.remote(NUM_ACTORS))
    stream.connect(fleet)
    yield Pipeline(sampler, fleet, stream)
    for actor in (fleet, sampler, stream.queue):
        ray.kill(actor)


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


@contextmanager
def killed_soon(actor: Any) -> Iterator[None]:
    """End ``actor``'s process, half a second into the block, as nobody expects it."""
    pid = pid_of(actor)
    timer = threading.Timer(0.5, partial(os.kill, pid, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    yield
    assert timer.finished.is_set(), "the block was over before the process was"
    assert time.monotonic() - start < MOST_SECONDS


def test_queue_that_dies_ends_the_wait_of_its_consumer(pipeline: Pipeline) -> None:
    names = pipeline.play(2, seconds=60)
    with killed_soon(pipeline.stream.queue), pytest.raises(RayActorError, match="TrajectoryQueue"):
        pipeline.take(names)
    pipeline.stream.finished()  # a checkpoint is written all the same


def test_fleet_whose_queue_has_died_does_not_look_healthy(pipeline: Pipeline) -> None:
    pipeline.play(12, seconds=0.5)  # more than the queue holds: it is needed whenever it dies
    with killed_soon(pipeline.stream.queue), pytest.raises(RayActorError, match="TrajectoryQueue"):
        while True:
            ray.get(pipeline.fleet.status.remote())
            time.sleep(0.1)


def test_fleet_that_dies_ends_the_wait_of_its_consumer(pipeline: Pipeline) -> None:
    names = pipeline.play(2, seconds=60)
    with killed_soon(pipeline.fleet), pytest.raises(RayActorError, match="RolloutFleet"):
        pipeline.take(names)


def test_sampler_that_dies_comes_back_and_no_rollout_fails(pipeline: Pipeline) -> None:
    with killed_soon(pipeline.sampler):
        groups = pipeline.take(pipeline.play(3, seconds=0.4))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [each.rollout_id for each in trajectories] == ["0/0", "1/0", "2/0"]
    assert [(each.termination_reason, each.error) for each in trajectories] == [
        (TerminationReason.ENV_DONE, None)
    ] * 3


def test_sampler_gone_for_good_fails_its_rollouts_at_once(pipeline: Pipeline) -> None:
    pipeline.order(["0", "1"], seconds=1.0)
    ray.kill(pipeline.sampler)
    start = time.monotonic()
    for group in pipeline.take(["0", "1"]):
        (trajectory,) = group.trajectories
        assert trajectory.termination_reason is TerminationReason.SAMPLER_ERROR
        assert "The sampler's process has ended" in (trajectory.error or "")
    assert time.monotonic() - start < MOST_SECONDS


def test_checkpoint_holds_what_has_not_been_taken_yet(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_stream, "DRAIN_SECONDS", 50.0)  # so that a busy machine is waited for
    names = [f"{index:02d}" for index in range(12)]  # more than queue and stream hold: the fleet has the rest
    pipeline.order(names, seconds=0.0)
    pipeline.order(["slow"], seconds=60.0)
    while (status := ray.get(pipeline.fleet.status.remote())).num_waiting or status.num_running > 1:
        time.sleep(0.05)
    assert [each.rollout_id for each in pipeline.stream.finished()] == [f"{name}/0" for name in names]
    assert [group.group_id for group in pipeline.take(names)] == names


def test_queue_or_a_fleet_that_hangs_ends_the_wait_too(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = pipeline.play(2, seconds=60)
    monkeypatch.setattr("actors.ray_tools.calls.CALL_ANSWER_SECONDS", 2.0)
    for actor in (pipeline.stream.queue, pipeline.fleet):
        pid = pid_of(actor)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TroupeError, match="did not answer for 2 s"):
                pipeline.take(names)
        finally:
            os.kill(pid, signal.SIGCONT)
