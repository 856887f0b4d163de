"""Clusters whose GPUs Ray only counts: the places of ranks and engines of each row of the page "On GPUs",
those of two runs side by side, and a start of the recipe ``math_gpu`` up to where a GPU would be used.

Run by test_pretended_gpus, which reads the JSON that this writes: nothing computes on these GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from gpu_page import ROWS
from machine import wait_until
from pretended_engine import devices
from ray import serve
from ray.cluster_utils import Cluster

from actors.learning.ranks import RankGroup, RankWorker, create_placement_group
from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel
from actors.weights.store import WeightStore
from environments import DatasetRegistry
from launch.cluster.session import check_resources
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from policies.settings import EngineConfig
from policies.tiny import build_model

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "qwen3.jinja"
QUESTION = {"question": "1+1", "ground_truth": "2"}
SIDE_BY_SIDE = ("learner.num_workers=3", "server.num_replicas=1")
SYNC_SECONDS = 1.0
"""Ray's count of what is free is that of a moment ago."""
Places = dict[str, Any]


class IdleRank(RankWorker):
    """Has the place of a rank, and no model."""

    def open_store(self) -> tuple[str, int]:
        return "", 0

    def open(self, rendezvous: tuple[str, int]) -> int:
        return 1

    def _load(self, **arguments: Any) -> Any:
        return None

    def devices(self) -> tuple[str, list[str]]:
        """Node and GPUs of this process."""
        return devices()


def main(target: Path) -> None:
    os.environ.update(RAYLET_ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 64, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found: Places = {}
    with TemporaryDirectory() as folder:
        model = str(build_model(Path(folder, "model"), [[{"role": "user", "content": "Hello."}]]))
        for row in ROWS:
            config = compose(list(row.settings))
            name = place_name(row.nodes, config)
            if name not in found:
                found[name] = alone(cluster, row.nodes, config, model)
        with (
            pretended_nodes(cluster, [8]),
            placed("first", of_two(), model) as first,
            placed("second", of_two(), model) as second,
        ):
            found["side by side"] = [first, second]
        with pretended_nodes(cluster, [2]):
            found["math_gpu"] = started("math_gpu", cluster.address, Path(folder), model)
        serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
    target.write_text(json.dumps(found))


def place_name(nodes: Sequence[int], config: TrainConfig) -> str:
    """Rows that need the same places are played once."""
    server = config.server
    parts = config.learner.num_workers, server.num_replicas, server.engine.num_gpus, server.colocated
    return " ".join(map(str, (list(nodes), *parts)))


def of_two() -> TrainConfig:
    """One of two runs that share eight GPUs."""
    return compose([*ROWS[-1].settings, *SIDE_BY_SIDE, "server.engine.num_gpus=1"])


@contextmanager
def pretended_nodes(cluster: Cluster, nodes: Sequence[int]) -> Iterator[None]:
    """Nodes with so many GPUs each, beside the head, which has none."""
    added = [cluster.add_node(num_cpus=16, num_gpus=count) for count in nodes]
    wait_until(lambda: ray.cluster_resources().get("GPU", 0) == sum(nodes))
    try:
        yield
    finally:
        for node in added:
            cluster.remove_node(node)
        wait_until(lambda: not ray.cluster_resources().get("GPU"))


def alone(cluster: Cluster, nodes: Sequence[int], config: TrainConfig, model: str) -> Places:
    with pretended_nodes(cluster, nodes), placed("row", config, model) as places:
        return places


@contextmanager
def placed(name: str, config: TrainConfig, model: str) -> Iterator[Places]:
    """The places of a run's ranks and engines, and the GPUs that are free beside it, while it is up."""
    check_resources(config)
    engine = EngineConfig(name="pretended_engine:PretendedEngine", num_gpus=config.server.engine.num_gpus)
    server, share = replace(config.server, engine=engine), config.server.gpus_of_rank
    store: Any = WeightStore.remote()  # type: ignore[attr-defined]
    with ExitStack() as ending:
        group = create_placement_group(config.learner, share)
        ranks = RankGroup(IdleRank, group, config.learner, share, shared_file=None, learner=config.learner)
        ending.callback(ranks.close)
        of_ranks = ray.get([rank.devices.remote() for rank in ranks._ranks])
        before = set(Path(model).glob("*.devices"))
        app = PolicyApp(name, ServedModel(path=model), server, store)
        app.wake()
        app.start()
        ending.callback(app.stop)
        notes = set(Path(model).glob("*.devices")) - before
        of_engines = [json.loads(each.read_text()) for each in notes]
        time.sleep(SYNC_SECONDS)
        free = ray.available_resources().get("GPU", 0.0)
        yield {"ranks": of_ranks, "engines": of_engines, "free": free}


def started(recipe: str, address: str, folder: Path, model: str) -> Places:
    """Start a recipe for Qwen3 as a user does, with a tiny model and one task in the place of its own."""
    shutil.copy(TEMPLATE, Path(model, "chat_template.jinja"))
    for name in ("deepscaler_math", "math500"):
        DatasetRegistry.register_dataset(name, [QUESTION], "train" if name[0] == "d" else "test")
    settings = [f"recipe={recipe}", f"model.path={model}", f"run.directory={folder / 'run'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "launch.train", *settings],
        env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return {"status": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
