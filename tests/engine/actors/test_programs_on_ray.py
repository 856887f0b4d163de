"""Rollouts that are programs, under kills: none is lost or counted twice, and no process stays behind."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from called_by_part import call_by_part

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.gateway.session_server import SessionServer
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.serving.keys import KEYS_VARIABLE
from actors.settings import FleetConfig
from environments.types import TerminationReason, TrajectoryGroup
from policies.learning.samples import training_samples
from policies.sampler import ScriptedSampler

NUM_ROLLOUTS, NUM_ACTORS, NUM_CALLS, NUM_KILLS = 40, 4, 3, 8
KEY = "a-key-of-the-programs"
MARK = "--a-program-under-kills"
PROGRAM = """
import json, os, time, urllib.request
messages = []
for number in range(3):
    messages.append({"role": "user", "content": str(number)})
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    time.sleep(0.05)
print(messages[-1]["content"])
"""


def solve(task: dict[str, Any], client: PolicyClient) -> float:
    result = client.run([sys.executable, "-c", PROGRAM, MARK], isolated=task["isolated"])
    return float(result.output == "a reply\n")


def converse(server: SessionServer, name: str) -> list[str]:
    """What a program elsewhere is answered, which sends each call once."""
    variables = {"base_url": f"{server.url}/v1", "api_key": f"{KEY}:{name}"}
    with openai.OpenAI(**variables, max_retries=0, http_client=httpx.Client(trust_env=False)) as client:
        messages: list[Any] = []
        for number in range(NUM_CALLS):
            messages.append({"role": "user", "content": str(number)})
            response = client.chat.completions.create(model="m", messages=messages)
            messages.append(response.choices[0].message)
            time.sleep(0.5)  # so that most kills come between two calls
    reward = httpx.post(
        f"{server.url}/sessions/{name}/reward",
        json={"reward": 1},
        headers={"authorization": f"Bearer {KEY}"},
        trust_env=False,
    )
    reward.raise_for_status()
    return [each.content for each in messages[1::2]]


def processes(part: str) -> list[int]:
    """Ids of the processes whose command line holds ``part``."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and part.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def kill_now_and_then(ended: threading.Event, pause: float = 0.7) -> None:
    rng = random.Random(0)
    for _ in range(NUM_KILLS):
        if ended.wait(pause):
            return
        if playing := processes("ray::RolloutActor.run"):
            os.kill(rng.choice(playing), signal.SIGKILL)


def assert_each_is_played_once(group: TrajectoryGroup) -> None:
    """Every rollout ended as it should, with the tokens of each of its calls once."""
    for each in group.trajectories:
        assert (each.termination_reason, each.reward) == (TerminationReason.ENV_DONE, 1.0), each.error
        (sample,) = training_samples(each)
        assert sample.num_sampled_tokens == NUM_CALLS * len(b"a reply.")


def test_killed_programs_are_played_again_and_leave_nothing(ray_cluster: None) -> None:
    stream = TrajectoryStream(capacity=8)
    sampler = SamplerActor.remote(partial(ScriptedSampler, ["a reply"] * NUM_CALLS))
    limits, config = RolloutLimits(timeout_seconds=120), FleetConfig(num_actors=NUM_ACTORS, retries=NUM_KILLS)
    fleet = RolloutFleet.remote(pair_of(None, None, solve, {}, {}), sampler, stream.queue, limits, config)
    stream.connect(fleet)
    ray.get(fleet.resize.remote(NUM_ACTORS))
    ended = threading.Event()
    killer = threading.Thread(target=kill_now_and_then, args=(ended,), daemon=True)
    requests = [
        RolloutRequest(rollout_id=f"a/{index:04d}", group_id="a", task={"isolated": index % 2 == 0})
        for index in range(NUM_ROLLOUTS)
    ]
    killer.start()
    (group,) = stream.groups(requests)
    ended.set()
    killer.join()
    assert [each.rollout_id for each in group.trajectories] == [each.rollout_id for each in requests]
    assert_each_is_played_once(group)
    ray.kill(fleet)
    stream.close()
    deadline = time.monotonic() + 30
    while processes(MARK) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(MARK) == []


def test_programs_elsewhere_notice_nothing_of_killed_actors(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"programs:{KEY}")
    server, num_rollouts = SessionServer(port=0), 8
    stream = TrajectoryStream(capacity=8)
    sampler = SamplerActor.remote(partial(ScriptedSampler, ["a reply"] * NUM_CALLS))
    limits, config = RolloutLimits(timeout_seconds=120), FleetConfig(num_actors=2, retries=NUM_KILLS)
    pair = pair_of(None, None, server.rollout, {}, {})
    fleet = RolloutFleet.remote(pair, sampler, stream.queue, limits, config)
    call_by_part(fleet)
    stream.connect(fleet)
    ray.get(fleet.resize.remote(2))
    ended = threading.Event()
    killer = threading.Thread(target=kill_now_and_then, args=(ended, 1.0), daemon=True)
    with ThreadPoolExecutor(2) as programs:
        played = [programs.submit(converse, server, f"a-{index}") for index in range(num_rollouts)]
        killer.start()
        requests = [
            RolloutRequest(rollout_id=f"b/{index:04d}", group_id="b", task={})
            for index in range(num_rollouts)
        ]
        (group,) = stream.groups(requests)
        ended.set()
        assert [each.result(60) for each in played] == [["a reply"] * NUM_CALLS] * num_rollouts
    killer.join()
    status = ray.get(fleet.status.remote())
    assert status.num_retries > 0 and status.num_resumed_turns > 0, status
    assert_each_is_played_once(group)
    ray.kill(fleet)
    stream.close()
    server.close()
