"""Replicas of somebody's own engine. One of them stops or dies: sampling goes on without it, nothing is lost,
and it comes back current.

The engine is a scripted one: it has no weights, and its versions show what a replica has loaded. The last
test ends ``scripted_policy``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import torch
from machine import wait_until
from ray import serve
from served_policy import ServedPolicy, publish, start_policy

from actors.gateway.function import pair_of
from actors.gateway.session_server import SessionServer
from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from actors.serving.keys import KEYS_VARIABLE
from actors.settings import ServerConfig
from actors.timing import LEASE_SECONDS
from actors.weights.store import WeightStore
from environments.types import Completion, Trajectory
from policies.learning.samples import training_samples
from policies.sampler import ReplicaStatus, SampleRequest, SamplingParams
from policies.settings import EngineConfig

WEIGHTS = {"scale": torch.ones(1)}
KEY = "a-key-of-the-programs"
CALLS = [5, 900, 5]
"""Tokens of a session's calls; its replica is killed in the second one."""


@pytest.fixture(scope="module")
def scripted_policy(serve_port: int, tiny_model: Path) -> ServedPolicy:
    """Two replicas whose engine is ``scripted_engine.ScriptedEngine``: it says ``1`` a thousand times."""
    options = {"replies": ["1" * 1000], "seconds_per_token": 0.005}
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options=options)
    config = ServerConfig(num_replicas=2, engine=engine)
    return start_policy("scripted", tiny_model, WeightStore.remote(), config)


def ask(sampler: Any, count: int, max_tokens: int = 5, version: int = 0) -> list[Any]:
    messages = [{"role": "user", "content": "What is 12+34?"}]
    params = SamplingParams(max_tokens=max_tokens)
    return [
        sampler.sample.remote(SampleRequest(messages=messages, params=params, min_version=version))
        for _ in range(count)
    ]


def ask_both(sampler: Any, num_before: int = 0) -> list[Any]:
    """Long requests, once all are handed out and each of the replicas is at some of them."""
    asked = ask(sampler, 16, max_tokens=900)

    def handed_out() -> bool:
        there = replicas(sampler).values()
        at_all = sum(each.num_running + each.num_answered for each in there)
        return at_all == 16 + num_before and all(each.num_running for each in there)

    wait_until(handed_out)
    return asked


def replicas(sampler: Any) -> dict[str, ReplicaStatus]:
    found: dict[str, ReplicaStatus] = ray.get(sampler.status.remote()).replicas
    return found


def pid_of(replica: str) -> int:
    return int(re.findall(r"pid (\d+)", replica)[0])


def played(server: SessionServer, sampler: Any) -> Trajectory:
    """A rollout whose program takes its task at the session server."""

    def sample(request: SampleRequest) -> Completion:
        completion: Completion = ray.get(sampler.sample.remote(request))
        return completion

    pair, request = (
        pair_of(None, None, server.rollout, {}, {}),
        RolloutRequest(rollout_id="a/0", group_id="a", task={}),
    )
    env = pair.make_env(request)
    try:
        return run_rollout(pair.make_agent(), env, sample, request, RolloutLimits(), Journal())
    finally:
        env.close()


def converse(server: SessionServer) -> list[str]:
    """What a program is answered, which sends each call once."""
    messages: list[Any] = []
    access = {"base_url": f"{server.url}/v1", "api_key": f"{KEY}:a"}
    with openai.OpenAI(**access, max_retries=0, http_client=httpx.Client(trust_env=False)) as client:
        for max_tokens in CALLS:
            messages.append({"role": "user", "content": "And?"})
            answer = client.chat.completions.create(model="m", messages=messages, max_tokens=max_tokens)
            messages.append(answer.choices[0].message)
        reward = {"headers": {"authorization": f"Bearer {KEY}"}, "json": {"reward": 1}}
        httpx.post(f"{server.url}/sessions/a/reward", **reward, trust_env=False).raise_for_status()
    return [each.content for each in messages[1::2]]


def test_engine_of_ones_own_is_sampled_by_its_handle(scripted_policy: ServedPolicy) -> None:
    completions = ray.get(ask(scripted_policy.sampler(), 4, max_tokens=7))
    assert {each.text for each in completions} == {"1" * 7}
    assert {each.logprobs for each in completions} == {(-0.5,) * 7}


def test_replica_that_was_stopped_is_current_before_it_serves(scripted_policy: ServedPolicy) -> None:
    sampler = scripted_policy.sampler()
    wait_until(lambda: len(replicas(sampler)) == 2)
    in_flight = ask_both(sampler)
    name = next(iter(replicas(sampler)))
    pid = pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert len(ray.get(in_flight)) == 16  # what it had is answered by the other one
        answered = replicas(sampler)[name].num_answered
        version = publish(scripted_policy.store, WEIGHTS)
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            found = {each.policy_version for each in ray.get(ask(sampler, 8, version=version))}
            assert found == {version}
            seconds.append(time.monotonic() - start)
        assert min(seconds) < LEASE_SECONDS  # nothing was given to it; any may be slow on a busy machine
        assert replicas(sampler)[name].num_answered == answered
        assert not replicas(sampler)[name].is_live
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: replicas(sampler)[name].is_live)
    while (
        replicas(sampler)[name].num_answered == answered
    ):  # whoever answers, nobody does so with old weights
        assert {each.policy_version for each in ray.get(ask(sampler, 8))} == {version}
    assert replicas(sampler)[name].version == version
    assert ray.get(sampler.status.remote()).num_waiting == 0


def test_replica_that_died_comes_back_with_the_newest_weights(
    scripted_policy: ServedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose call it was sampling notices nothing, and its session is trained once."""
    monkeypatch.setenv(KEYS_VARIABLE, f"programs:{KEY}")
    version = scripted_policy.publish(WEIGHTS)
    sampler, server = scripted_policy.sampler(), SessionServer(port=0)
    wait_until(lambda: len(replicas(sampler)) == 2)
    before = replicas(sampler)
    with ThreadPoolExecutor(2) as threads:
        rollout, program = threads.submit(played, server, sampler), threads.submit(converse, server)
        wait_until(lambda: sum(each.num_answered for each in replicas(sampler).values()) == 1)
        wait_until(lambda: any(each.num_running for each in replicas(sampler).values()))
        killed = next(name for name, each in replicas(sampler).items() if each.num_running)
        in_flight = ask_both(sampler, num_before=2)
        os.kill(pid_of(killed), signal.SIGKILL)
        assert {each.policy_version for each in ray.get(in_flight)} == {version}
        assert program.result(60) == ["1" * num_tokens for num_tokens in CALLS]
        (sample,) = training_samples(rollout.result(60))
    server.close()
    assert sample.num_sampled_tokens == sum(CALLS) and sample.policy_version == version
    wait_until(lambda: len(replicas(sampler)) == 3)
    (anew,) = replicas(sampler).keys() - before.keys()
    while not replicas(sampler)[anew].num_answered:
        assert {each.policy_version for each in ray.get(ask(sampler, 8))} == {version}


def test_policy_server_ends_when_its_program_was_killed(
    scripted_policy: ServedPolicy,
) -> None:
    ray.kill(scripted_policy.store)  # as it goes with a program's actors; Serve's stay
    wait_until(lambda: scripted_policy.name not in serve.status().applications)
