"""Importing this lets a program in this folder, and the Ray workers that it starts, import Troupe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

os.chdir(ROOT)  # Ray's workers look for modules where their driver stands
sys.path.insert(0, str(ROOT))


def start_ray(num_nodes: int = 1) -> None:
    """Start Ray with four CPUs a node; its workers import modules of this folder and of tests/ too."""
    import ray
    from ray.cluster_utils import Cluster

    from actors.ray_tools.connect import RAYLET_ENVIRONMENT

    os.environ.update(RAYLET_ENVIRONMENT)
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "benchmarks")
    address, of_own = "local", {"num_cpus": 4, "include_dashboard": False}
    if num_nodes > 1:
        cluster = Cluster(initialize_head=True, head_node_args=of_own)
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=4)
        address, of_own = cluster.address, {}
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, folders))}},
        **of_own,
    )
