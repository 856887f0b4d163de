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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import ray
from gpu_page import ROWS
from machine import wait_until
from ray import serve
from ray.cluster_utils import Cluster

from actors.learning.ranks import RankGroup, create_placement_group
from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.serving import policy_app
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel
from environments import DatasetRegistry
from launch.cluster.session import RAY_ENVIRONMENT, check_resources
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "qwen3.jinja"
QUESTION = {"question": "1+1", "ground_truth": "2"}
SIDE_BY_SIDE = (
    "learner.num_workers=3",
    "server.engine.num_gpus=1",
    "~server.engine.options.tensor_parallel_size",
)
SYNC_SECONDS = 1.0
"""Ray's count of what is free is that of a moment ago."""
Places = dict[str, Any]


def devices() -> tuple[str, list[str]]:
    """This process's node, and the GPUs that CUDA would show it there."""
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")


class IdleRank:
    """Has the place of a rank, and imports nothing: fifty of them start."""

    def __init__(self, environment: dict[str, str]) -> None: ...

    def open_store(self) -> tuple[str, int]:
        return "", 0

    def open(self, rendezvous: tuple[str, int]) -> int:
        return 1

    def devices(self) -> tuple[str, list[str]]:
        return devices()


@serve.deployment
class IdleServer:
    """Has the place of a replica of the policy server, and notes its GPUs beside the model."""

    def __init__(self, model: ServedModel, *arguments: Any) -> None:
        Path(model.path, f"{os.getpid()}.devices").write_text(json.dumps(devices()))


def main(target: Path, tiny_model: Path) -> None:
    os.environ.update(RAYLET_ENVIRONMENT | RAY_ENVIRONMENT)  # the recipe has none to add
    policy_app.PolicyServer = IdleServer  # type: ignore[misc, assignment]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 64, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found: Places = {}
    with TemporaryDirectory() as folder:
        model = str(shutil.copytree(tiny_model, Path(folder, "model")))
        for nodes in ([1], [2], [8], [8] * 4):
            with pretended_nodes(cluster, nodes):
                found |= rows_of(nodes, model)
                if nodes == [2]:
                    found["math_gpu"] = started("math_gpu", cluster.address, Path(folder), model)
                if nodes == [8]:
                    with placed("first", of_two(), model) as one, placed("second", of_two(), model) as other:
                        found["side by side"] = [one, other]
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
    return compose([*ROWS[-1].settings, *SIDE_BY_SIDE])


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


def rows_of(nodes: Sequence[int], model: str) -> Places:
    """The places of each row that is for these nodes, one after the other."""
    found: Places = {}
    for config in (compose(list(row.settings)) for row in ROWS if row.nodes == nodes):
        if (name := place_name(nodes, config)) not in found:
            with placed("row", config, model) as found[name]:
                pass
            wait_until(lambda: ray.available_resources().get("GPU") == sum(nodes))
    return found


@contextmanager
def placed(name: str, config: TrainConfig, model: str) -> Iterator[Places]:
    """The places of a run's ranks and engines, and the GPUs that are free beside it, while it is up."""
    check_resources(config)
    learner, share, nothing = config.learner, config.server.gpus_of_rank, cast(Any, None)
    with ExitStack() as ending:
        ranks = RankGroup(cast(Any, IdleRank), create_placement_group(learner, share), learner, share)
        ending.callback(ranks.close)
        of_ranks = ray.get([rank.devices.remote() for rank in ranks._ranks])
        before = set(Path(model).glob("*.devices"))
        app = PolicyApp(name, ServedModel(path=model), config.server, store=nothing)
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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
