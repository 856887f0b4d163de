"""The CPU milliseconds of a request in the sampling actors, with one and with more of them.

    python tests/benchmarks/sampling_actors.py [--actors 1,2] [--requests 2000]

Each actor is on a node of its own, with a raylet of its own on this machine, and has its callers there. The
same two replicas of a policy server, whose engine plays a reply, fetch from all. Every actor has as many
requests in flight, as a node more brings its pairs: with fewer, less travels with a poll. Each request is
rendered, encoded, leased, answered, decoded and sent back, as rollouts have it, by the link of a rollout
actor. In the last arm the last actor is killed half-way.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import ray
from ray import serve
from report import Report
from repository import ROOT, start_ray

sys.path.insert(0, str(ROOT / "tests"))  # for scripted_engine

from actors.ray_tools.placement import on_node, start_actor
from actors.rollouts.rollout_actor import RayLink
from actors.sampling.node_samplers import combined
from actors.sampling.queue_worker import CONNECTION
from actors.sampling.sampler_actor import SamplerActor
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from policies.sampler import SampleRequest
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

NUM_REPLICAS, IN_FLIGHT = 2, 32
REPLY = "A reply of some words, as a model gives them. " * 4
MESSAGES = [{"role": "user", "content": "A question of some words, as an environment asks it. " * 8}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--actors", default="1,2", help="numbers of sampling actors")
    parser.add_argument("--requests", type=int, default=2000, help="of each arm")
    arguments = parser.parse_args()
    numbers = [int(each) for each in arguments.actors.split(",")]
    report = Report(
        f"{arguments.requests} requests, {IN_FLIGHT} in flight of each actor, {NUM_REPLICAS} replicas",
        (
            *("sampling actors", "CPU ms a request", "of each actor, a request of its own", "requests/s"),
            *("answered by each actor", "by each replica"),
        ),
    )
    start_ray(max(numbers))
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer([[*MESSAGES, {"role": "assistant", "content": REPLY}]]).save_pretrained(folder)
        engine = EngineConfig(
            name="scripted_engine:ScriptedEngine",
            max_model_tokens=4096,
            options={"replies": [REPLY], "seconds_per_token": 0.001},
        )
        config = ServerConfig(num_replicas=NUM_REPLICAS, engine=engine)
        app = PolicyApp("sampled", ServedModel(path=folder), config, WeightStore.remote())  # type: ignore[attr-defined]
        app.start()
        for number in numbers:
            report.add(str(number), *measure(number, folder, arguments.requests))
        report.add(f"{number}, one killed", *measure_killed(number, folder, arguments.requests))
        app.stop()
        serve.shutdown()
    report.print()
    ray.shutdown()


def started(number: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Sampling actors on as many nodes, and their callers there, which have made their first calls."""
    places = [on_node(each["NodeID"]) for each in ray.nodes()[:number]]
    recipe = partial(ServeSampler, "sampled", folder)
    samplers = [start_actor(SamplerActor, recipe, **place) for place in places]
    ray.get([sampler.open.remote() for sampler in samplers])
    pairs = zip(places, samplers, strict=True)
    callers = [start_actor(Callers, sampler, **place) for place, sampler in pairs]
    ray.get([each.ask.remote(200, IN_FLIGHT) for each in callers])  # first calls are slower
    return samplers, callers


def measure(number: int, folder: str, num_requests: int) -> tuple[str, ...]:
    """Cells of a row: ``number`` sampling actors answer the requests."""
    samplers, callers = started(number, folder)
    processes, share = [process_of(each) for each in samplers], num_requests // number
    before, earlier, start = shares(samplers), [cpu_seconds(each) for each in processes], time.perf_counter()
    answered = ray.get([each.ask.remote(share, IN_FLIGHT) for each in callers])
    seconds = time.perf_counter() - start
    cpu = [cpu_seconds(each) - then for each, then in zip(processes, earlier, strict=True)]
    parts = [after - count for after, count in zip(shares(samplers), before, strict=True)]
    end(samplers, callers)
    return (
        f"{1000 * sum(cpu) / num_requests:.2f}",
        ", ".join(f"{1000 * each / share:.2f}" for each in cpu),
        f"{num_requests / seconds:.0f}",
        ", ".join(map(str, answered)),
        ", ".join(map(str, parts)),
    )


def measure_killed(number: int, folder: str, num_requests: int) -> tuple[str, ...]:
    """Cells of a row: the last of ``number`` sampling actors is killed half-way, and Ray starts it anew."""
    samplers, callers = started(number, folder)
    process, before, start = process_of(samplers[-1]), sum(shares(samplers)), time.perf_counter()
    asked = [each.ask.remote(num_requests // number, IN_FLIGHT) for each in callers]
    while sum(shares(samplers)) < before + num_requests // 2:
        time.sleep(0.05)
    process.kill()
    answered, seconds = ray.get(asked), time.perf_counter() - start
    end(samplers, callers)
    return "", "", f"{num_requests / seconds:.0f}", ", ".join(map(str, answered)), ""


def end(samplers: list[Any], callers: list[Any]) -> None:
    """End all of them."""
    for each in (*callers, *samplers):
        ray.kill(each)


@ray.remote(num_cpus=0)
class Callers:
    """Callers of one sampling actor, in a process as the rollout actors are."""

    def __init__(self, sampler: ray.actor.ActorHandle) -> None:
        self._link = RayLink(sampler, sampler, None)

    def ask(self, count: int, in_flight: int) -> int:
        """Have so many requests answered, each in a conversation of its own; return the number of answers."""

        def answer(index: int) -> bool:
            request = SampleRequest(messages=MESSAGES, session_id=f"{os.getpid()} {time.time()} {index}")
            return bool(self._link.sample(request, time.monotonic() + 120).text)

        with ThreadPoolExecutor(in_flight) as threads:
            return sum(threads.map(answer, range(count)))


def shares(samplers: list[Any]) -> list[int]:
    """Answers of each replica to all sampling actors."""
    replicas = combined(ray.get([each.status.remote() for each in samplers])).replicas
    counts: Counter[str] = Counter()
    for name, each in replicas.items():
        counts[name.partition(CONNECTION)[0]] += each.num_answered
    return [counts[name] for name in sorted(counts)]


def process_of(sampler: Any) -> psutil.Process:
    """The process of a sampling actor."""
    return psutil.Process(ray.get(sampler.__ray_call__.remote(lambda _: os.getpid())))


def cpu_seconds(process: psutil.Process) -> float:
    """Seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
