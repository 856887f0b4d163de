"""The number of replicas follows the tokens in flight, with nothing lost when one comes or goes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from machine import wait_until
from ray import serve
from served_policy import publish, wait_for_version

from actors.serving import autoscaling
from actors.serving.autoscaling import ReplicasForTokens
from actors.serving.policy_app import PolicyApp
from actors.serving.replicas import resize
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.errors import ConfigError
from launch.settings.compose import compose
from launch.validation.serving import check_engine
from policies.settings import EngineConfig


@pytest.mark.parametrize(
    ("reported", "number"), [([], 1), ([0], 1), ([100], 1), ([60, 41], 2), ([150, 151], 4)]
)
def test_there_are_as_many_replicas_as_the_tokens_in_flight_need(reported: list[int], number: int) -> None:
    metrics = {autoscaling.TOKENS_IN_FLIGHT: {str(replica): value for replica, value in enumerate(reported)}}
    context: Any = SimpleNamespace(aggregated_metrics=metrics if reported else {})
    assert ReplicasForTokens(100)(context) == (number, {})


def test_fewer_replicas_at_most_than_at_least_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"server\.max_replicas=1 is below server\.num_replicas=2"):
        check_engine(compose(["recipe=calculator", "server.num_replicas=2", "server.max_replicas=1"]))


@pytest.fixture
def store(ray_cluster: None) -> Any:
    return WeightStore.remote()


@pytest.fixture
def growing(
    serve_port: int, tiny_model: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PolicyApp]:
    """A server with one replica or two, which is quick to change its mind; an answer takes half a second."""
    monkeypatch.setattr(autoscaling, "SCALE_DOWN_SECONDS", 5.0)
    options = {"replies": ["word " * 9], "seconds_per_token": 0.05}
    config = ServerConfig(
        engine=EngineConfig(name="scripted_engine:ScriptedEngine", options=options),
        http_port=serve_port,
        max_replicas=2,
        tokens_per_replica=200,
    )
    app = PolicyApp("growing", ServedModel(path=str(tiny_model)), config, store)
    app.start()
    yield app
    app.stop()


def num_replicas() -> int:
    (deployment,) = serve.status().applications["growing"].deployments.values()
    return sum(deployment.replica_states.values())


def test_replica_comes_and_goes_with_load_and_no_request_fails(
    growing: PolicyApp, serve_port: int, store: Any
) -> None:
    url = f"http://127.0.0.1:{serve_port}/v1/completions"
    versions: list[int] = []
    is_busy = True

    def ask(_: int) -> None:
        while is_busy:
            answer = httpx.post(url, json={"model": "policy", "prompt": "a", "max_tokens": 50}, timeout=60)
            assert answer.status_code == 200, answer.text
            versions.append(answer.json()["policy_version"])

    wait_for_version(growing.name, publish(store, {"scale": torch.ones(1)}))
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, number) for number in range(8)]
        try:
            wait_until(lambda: num_replicas() == 2, seconds=300)
            wait_until(partial(all_run, 2), seconds=300)
        finally:
            is_busy = False
    for each in asked:
        each.result()
    assert set(versions) == {1}, "the late one was current before it served"
    wait_until(lambda: num_replicas() == 1, seconds=300)
    with pytest.raises(ConfigError, match=r"server\.max_replicas"):
        resize("growing", 2)
    assert httpx.get(f"http://127.0.0.1:{serve_port}/health").status_code == 200


def all_run(number: int) -> bool:
    (deployment,) = serve.status().applications["growing"].deployments.values()
    return deployment.replica_states == {"RUNNING": number}
