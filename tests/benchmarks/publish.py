"""Seconds from the call of ``LearnerGroup.publish`` until every replica serves the new version.

python tests/benchmarks/publish.py [--rounds 5] [--models tiny,medium] [--transport object_store]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import models
import ray
import repository  # noqa: F401
from report import Report

from actors.learning.learner_group import LearnerGroup
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from actors.weights.transport import WeightTransport, make_transport
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig
from policies.settings import EngineConfig

MODELS = {"tiny": models.tiny, "medium": models.medium}
REPLICAS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="publications of each row; the median counts")
    parser.add_argument("--models", default=",".join(MODELS), help="tiny (353k), medium (175M), or both")
    parser.add_argument("--transport", default="object_store", help="as server.weights.transport")
    arguments = parser.parse_args()
    report = Report(
        f"publish by {arguments.transport}: seconds, median of {arguments.rounds}; the engines are idle",
        ("model", "replicas", "publish()", "until served", "together", "all rounds"),
    )
    # Never a cluster that happens to run here: its work would be measured too.
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = MODELS[name](Path(folder))
            transport = make_transport({"transport": arguments.transport}, folder, "training")
            for num_replicas, rounds in _publications(model, arguments.rounds, transport):
                published, served, total = map(statistics.median, zip(*rounds, strict=True))
                listed = " ".join(f"{each:.2f}" for _, _, each in rounds)
                figures = f"{published:.2f}", f"{served:.2f}", f"{total:.2f}"
                report.add(name, str(num_replicas), *figures, listed)
    ray.shutdown()
    report.print()


def _publications(
    model: str, num_rounds: int, transport: WeightTransport
) -> Iterator[tuple[int, list[tuple[float, float, float]]]]:
    """For each number of replicas: seconds of ``publish``, from then until served, and both."""
    store = WeightStore.remote(transport)  # type: ignore[attr-defined]
    learner = LearnerGroup(model, LearnerConfig(), resolve(AlgorithmConfig(), 512), 1, 0, store)
    version = 0
    for num_replicas in REPLICAS:
        config = ServerConfig(num_replicas=num_replicas, engine=EngineConfig(max_model_tokens=128))
        app = PolicyApp("benchmark", ServedModel(path=model), config, store)
        app.start()
        rounds = []
        for number in range(num_rounds + 1):
            version += 1
            start = time.perf_counter()
            learner.publish(version)
            published = time.perf_counter()
            app.wait_for_version(version)
            served = time.perf_counter()
            if number:  # the first one also builds connections
                rounds.append((published - start, served - published, served - start))
        app.stop()
        yield num_replicas, rounds
    learner.close()
    ray.kill(store)


if __name__ == "__main__":
    main()
