"""Rollouts that are programs, under kills: none is lost or counted twice, and no process stays behind."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from environments.types import TerminationReason
from policies.learning.samples import training_samples
from policies.sampler import ScriptedSampler

NUM_ROLLOUTS, NUM_ACTORS, NUM_CALLS, NUM_KILLS = 64, 4, 3, 8
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


def kill_now_and_then(ended: threading.Event) -> None:
    rng = random.Random(0)
    for _ in range(NUM_KILLS):
        if ended.wait(0.7):
            return
        if playing := processes("ray::RolloutActor.run"):
            os.kill(rng.choice(playing), signal.SIGKILL)


def test_killed_programs_are_played_again_and_leave_nothing(ray_cluster: None) -> None:
    stream = TrajectoryStream(capacity=8)
    sampler = SamplerActor.remote(partial(ScriptedSampler, ["a reply"] * NUM_CALLS))
    limits, config = RolloutLimits(timeout_seconds=120), FleetConfig(num_actors=NUM_ACTORS, retries=NUM_KILLS)
    fleet = RolloutFleet.remote(
        pair_of(None, None, solve, {}, {}), sampler, stream.queue.actor, limits, config
    )
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
    for each in group.trajectories:
        assert (each.termination_reason, each.reward) == (TerminationReason.ENV_DONE, 1.0), each.error
        (sample,) = training_samples(each)
        assert sample.num_sampled_tokens == NUM_CALLS * len(b"a reply.")
    ray.kill(fleet)
    stream.close()
    deadline = time.monotonic() + 30
    while processes(MARK) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(MARK) == []
