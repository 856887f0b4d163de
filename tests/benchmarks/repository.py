"""Importing this lets a program in this folder, and the Ray workers that it starts, import Troupe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

os.chdir(ROOT)  # Ray's workers look for modules where their driver stands
sys.path.insert(0, str(ROOT))


def start_ray() -> None:
    """Start a Ray cluster of four CPUs, whose workers import modules of this folder and of tests/ too."""
    import ray

    from actors.ray_tools.connect import RAYLET_ENVIRONMENT

    os.environ.update(RAYLET_ENVIRONMENT)
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "benchmarks")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, folders))}},
    )
