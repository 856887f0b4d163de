"""Seconds for which ``LearnerGroup.publish`` holds the learner, then until all replicas serve it, and bytes.

    python tests/benchmarks/publish.py [--models smollm2-135m-instruct] [--dtype bfloat16] [--ranks 2]

``publish()`` is also given as a multiple of the time in which this program casts as many weights and copies
them once. Bytes are multiples of the weights' in the engines' dtype: the most that the object store holds,
where the version before lies too, and the most that one of the learner's ranks adds to memory of its own.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Iterator, Sequence
from pathlib import Path

import models
import psutil
import ray
import repository
import torch
from report import Report

from actors.learning.learner_group import LearnerGroup
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from actors.weights.transport import WeightTransport, make_transport
from launch.health.members import members
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig
from policies.settings import EngineConfig

sys.path.insert(0, str(repository.ROOT / "tests"))

from served_policy import wait_for_version

REPLICAS = (1, 2)
RANK_GPU = 0.5
"""Share of a GPU that a rank reserves: the replicas have the rest."""
PAUSE_SECONDS = 1.0
"""Seconds between two publications, in which a training would make an update."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="publications of each row; the median counts")
    parser.add_argument("--models", default="tiny,medium", help="or large, of 493M weights, or as model.path")
    parser.add_argument("--ranks", type=int, default=1, help="of the learner")
    parser.add_argument("--dtype", default="float32", help="of the engines: float32 or bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: rank and replicas share one GPU")
    parser.add_argument("--transport", default="object_store", help="as server.weights.transport")
    arguments = parser.parse_args()
    report = Report(
        f"publish by {arguments.transport}: seconds, median of {arguments.rounds}; the engines are idle",
        (
            "model",
            "replicas",
            "publish()",
            "of a copy",
            "until served",
            "together",
            "object store",
            "a rank",
            "all rounds",
        ),
    )
    # Never a cluster that happens to run here: its work would be measured too.
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = models.chosen(name, Path(folder))
            transport = make_transport({"transport": arguments.transport}, folder, "training")
            options, num_gpus = {"dtype": arguments.dtype}, 0.0
            if arguments.device == "cuda":
                options, num_gpus = options | {"gpu_memory_utilization": 0.2}, RANK_GPU / len(REPLICAS)
            engine = EngineConfig(max_model_tokens=128, num_gpus=num_gpus, options=options)
            copy, copying = _copied(_num_parameters(Path(model)), getattr(torch, arguments.dtype))
            learner = LearnerConfig(num_workers=arguments.ranks, device=arguments.device)
            for num_replicas, rounds in _publications(model, engine, learner, arguments.rounds, transport):
                published, served, total, stored, held = map(statistics.median, zip(*rounds, strict=True))
                listed = " ".join(f"{each[2]:.2f}" for each in rounds)
                seconds = f"{published:.2f}", f"{published / copying:.1f}x", f"{served:.2f}", f"{total:.2f}"
                copies = f"{stored / copy:.2f}x", f"{held / copy:.2f}x"
                report.add(name, str(num_replicas), *seconds, *copies, listed)
    ray.shutdown()
    report.print()


def _num_parameters(model: Path) -> int:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _copied(num_weights: int, dtype: torch.dtype) -> tuple[int, float]:
    """Bytes of as many weights, and the seconds to cast and copy them once, to memory that is there."""
    weights, copy = torch.ones(num_weights), torch.zeros(num_weights, dtype=dtype)
    return copy.nbytes, min(timeit.repeat(lambda: copy.copy_(weights), number=1))


class Peak:
    """Most bytes that were seen while the block ran: in the object store, and added to the own memory of one
    of some processes."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._before = {process: _own_bytes(process) for process in processes}
        self.stored = self.held = 0.0

    def __enter__(self) -> Peak:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            name = "object_store_memory"
            stored = ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0)
            self.stored = max(self.stored, stored)
            self.held = max(self.held, *(_own_bytes(each) - before for each, before in self._before.items()))


def _own_bytes(process: psutil.Process) -> float:
    """Without what lies in memory that processes share, as the object store does."""
    memory = process.memory_info()
    return float(memory.rss - memory.shared)


def _publications(
    model: str, engine: EngineConfig, settings: LearnerConfig, num_rounds: int, transport: WeightTransport
) -> Iterator[tuple[int, list[tuple[float, float, float, float, float]]]]:
    """For each number of replicas and round: seconds of ``publish``, from then until served, and both; most
    bytes of the object store, and those that a rank adds."""
    store = WeightStore.remote(transport)  # type: ignore[attr-defined]
    algorithm = resolve(AlgorithmConfig(), 512)
    learner = LearnerGroup(
        model, settings, algorithm, 1, 0, store, engine_dtype=engine.half_dtype, num_gpus=RANK_GPU
    )
    learner.check_ranks()
    ranks = [psutil.Process(each.pid) for each in members(below=os.getpid()) if each.role == "learner"]
    version = 0
    for num_replicas in REPLICAS:
        config = ServerConfig(num_replicas=num_replicas, engine=engine)
        app = PolicyApp("benchmark", ServedModel(path=model), config, store)
        app.start()
        rounds = []
        for number in range(num_rounds + 1):
            version += 1
            time.sleep(PAUSE_SECONDS)
            with Peak(ranks) as peak:
                start = time.perf_counter()
                learner.publish(version)
                published = time.perf_counter()
                wait_for_version(app.name, version)
                served = time.perf_counter()
            if number:  # the first one also builds connections
                seconds = published - start, served - published, served - start
                rounds.append((*seconds, peak.stored, peak.held))
        app.stop()
        yield num_replicas, rounds
    learner.close()
    ray.kill(store)


if __name__ == "__main__":
    main()
