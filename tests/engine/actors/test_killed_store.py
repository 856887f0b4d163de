"""The weight store is killed, again and again, while a run waits: the wait ends with the store's name."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.service import RolloutService
from actors.serving.policy_app import PolicyApp
from actors.settings import FleetConfig, ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.base import BaseEnv
from policies import GameAgent
from policies.sampler import ScriptedSampler

NUM_KILLS = 2
MOST_SECONDS = 60.0
"""From the death until the wait is over."""


class EndlessEnv(BaseEnv):
    """Takes a tenth of a second for each of its very many steps."""

    def reset(self) -> tuple[dict, dict]:
        return {"question": "?"}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        time.sleep(0.1)
        return "", 0.0, False, {}

    @staticmethod
    def from_dict(info: dict) -> EndlessEnv:
        return EndlessEnv()


class NeverUp(PolicyApp):
    """Is as far as an application whose replicas have lost their store: Serve waits for it for ever."""

    def start(self) -> None:
        threading.Event().wait()


@pytest.fixture
def make_service(ray_cluster: None) -> Iterator[Any]:
    """``make_service(store)``: rollouts without an end, and a policy server that follows ``store``."""
    services = []

    def make(store: Any) -> RolloutService:
        services.append(
            RolloutService(
                Pair(agent_class=GameAgent, env_class=EndlessEnv),
                partial(ScriptedSampler, ["again"] * 10_000),
                RolloutLimits(max_steps=10_000),
                FleetConfig(num_actors=1),
                [NeverUp(f"never-up-{len(services)}", ServedModel(path=""), ServerConfig(), store)],
            )
        )
        return services[-1]

    yield make
    for service in services:
        service.stop()


def kill_soon(store: Any, seconds: float) -> float:
    """Have the store's process killed after ``seconds``; return when that will be."""
    pid = ray.get(store.__ray_call__.remote(lambda _: os.getpid()))
    threading.Timer(seconds, partial(os.kill, pid, signal.SIGKILL)).start()
    return time.monotonic() + seconds


def test_killed_store_ends_the_wait_for_a_group(make_service: Any) -> None:
    for number in range(NUM_KILLS):
        store = WeightStore.remote()
        service = make_service(store)
        service.start_actors(1)
        service.stream.request([RolloutRequest(rollout_id="0/0", group_id="0", task={})])
        killed = kill_soon(store, random.Random(number).uniform(0, 2))
        with pytest.raises(RayActorError, match="WeightStore"):
            service.stream.take("0")
        assert time.monotonic() - killed < MOST_SECONDS


def test_killed_store_ends_the_wait_for_the_policy_server(make_service: Any) -> None:
    for number in range(NUM_KILLS):
        store = WeightStore.remote()
        service = make_service(store)
        service.start_in_background(0)
        killed = kill_soon(store, random.Random(number).uniform(0, 2))
        with pytest.raises(RayActorError, match="WeightStore"):
            service.wait_until_up(MOST_SECONDS)
        assert time.monotonic() - killed < MOST_SECONDS
