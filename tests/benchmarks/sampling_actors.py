"""The CPU milliseconds of a request in the sampling actors, with one and with more of them.

    python tests/benchmarks/sampling_actors.py [--actors 1,2] [--requests 2000]

As on so many nodes: each actor has callers of its own, and the same two replicas of a policy server, whose
engine plays a reply, fetch from all. Every arm has as many requests, and as many of them in flight. Each is
rendered, encoded, leased, answered, decoded and sent back, as rollouts have it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial

import psutil
import ray
from ray import serve
from report import Report
from repository import ROOT, start_ray

sys.path.insert(0, str(ROOT / "tests"))  # for scripted_engine

from actors.sampling.node_samplers import combined
from actors.sampling.sampler_actor import SamplerActor
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from policies.sampler import SampleRequest
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

NUM_REPLICAS, IN_FLIGHT = 2, 64
REPLY = "A reply of some words, as a model gives them. " * 4
MESSAGES = [{"role": "user", "content": "A question of some words, as an environment asks it. " * 8}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--actors", default="1,2", help="numbers of sampling actors")
    parser.add_argument("--requests", type=int, default=2000, help="of each arm")
    arguments = parser.parse_args()
    report = Report(
        f"{arguments.requests} requests, {IN_FLIGHT} in flight, {NUM_REPLICAS} replicas",
        ("sampling actors", "CPU ms a request", "of each actor", "requests/s", "answered by each replica"),
    )
    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer([[*MESSAGES, {"role": "assistant", "content": REPLY}]]).save_pretrained(folder)
        engine = EngineConfig(
            name="scripted_engine:ScriptedEngine",
            max_model_tokens=4096,
            options={"replies": [REPLY], "seconds_per_token": 0.001},
        )
        config = ServerConfig(num_replicas=NUM_REPLICAS, engine=engine)
        app = PolicyApp("sampled", ServedModel(path=folder), config, WeightStore.remote())
        app.start()
        for number in map(int, arguments.actors.split(",")):
            report.add(str(number), *measure(number, folder, arguments.requests))
        app.stop()
        serve.shutdown()
    report.print()


def measure(number: int, folder: str, num_requests: int) -> tuple[str, ...]:
    """Cells of a row: ``number`` sampling actors answer the requests."""
    samplers = [SamplerActor.remote(partial(ServeSampler, "sampled", folder)) for _ in range(number)]
    ray.get([sampler.open.remote() for sampler in samplers])
    callers = [Callers.remote(sampler) for sampler in samplers]
    ray.get([each.ask.remote(200, IN_FLIGHT) for each in callers])  # first calls are slower
    answered, before, start = shares(samplers), cpu_seconds(), time.perf_counter()
    ray.get([each.ask.remote(num_requests // number, IN_FLIGHT // number) for each in callers])
    seconds, used = (
        time.perf_counter() - start,
        [after - earlier for after, earlier in zip(cpu_seconds(), before, strict=True)],
    )
    parts = [after - earlier for after, earlier in zip(shares(samplers), answered, strict=True)]
    for each in (*callers, *samplers):
        ray.kill(each)
    return (
        f"{1000 * sum(used) / num_requests:.2f}",
        ", ".join(f"{1000 * each / num_requests:.2f}" for each in used),
        f"{num_requests / seconds:.0f}",
        ", ".join(map(str, parts)),
    )


@ray.remote(num_cpus=0)
class Callers:
    """Callers of one sampling actor, in a process as the rollout actors are."""

    def __init__(self, sampler: ray.actor.ActorHandle) -> None:
        self._sampler = sampler

    def ask(self, count: int, in_flight: int) -> None:
        """Have so many requests answered, each in a conversation of its own."""
        waiting: list[ray.ObjectRef] = []
        for index in range(count):
            if len(waiting) == in_flight:
                done, waiting = ray.wait(waiting)
                ray.get(done)
            request = SampleRequest(messages=MESSAGES, session_id=f"{os.getpid()} {time.time()} {index}")
            waiting.append(self._sampler.sample.remote(request))
        ray.get(waiting)


def shares(samplers: list[ray.actor.ActorHandle]) -> list[int]:
    """Answers of each replica to all sampling actors."""
    replicas = combined(ray.get([each.status.remote() for each in samplers])).replicas
    return [replicas[name].num_answered for name in sorted(replicas)]


def cpu_seconds() -> list[float]:
    """Seconds of each sampling actor's process, in the order of their ids."""
    raylet = psutil.Process(ray._private.worker._global_node.all_processes["raylet"][0].process.pid)
    title = "ray::SamplerActor"
    found = [each for each in raylet.children(recursive=True) if " ".join(each.cmdline()).startswith(title)]
    times = [each.cpu_times() for each in sorted(found, key=lambda each: each.pid)]
    return [each.user + each.system for each in times]


if __name__ == "__main__":
    main()
