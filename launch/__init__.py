"""Configuration, wiring and commands: the front door. Importing this is light, so that ``--help`` is fast."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.settings.tree import TrainConfig
    from launch.training.trainer import AgentTrainer
    from launch.workload import Workload

PACKAGES = ("environments", "policies", "actors", "launch")
ROOT = Path(__file__).resolve().parents[1]
RAY_WORKER = "default_worker.py"
"""Ray's program in which actors live."""


def name_clash() -> str | None:
    """The sentence about a folder or file that hides a package of Troupe's, here or in Ray's workers.

    Workers look in the program's working directory first, wherever the program lies. They themselves may
    work in the folder in which Ray was started, where they look for nothing.
    """
    is_worker = os.path.basename(sys.argv[0]) == RAY_WORKER
    folders = sys.path if is_worker else [os.getcwd(), *sys.path]
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, folders)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found.is_relative_to(ROOT):
            continue
        theirs = found.parent if found.name == "__init__.py" else found
        return (
            f"{theirs} has the name of a package of Troupe's, and Python would import it instead: rename it, "
            "or work in another folder."
        )
    return None


if clash := name_clash():
    if os.path.basename(sys.argv[0]) not in ("-m", "troupe"):  # a program of the user's
        raise ImportError(clash)
    sys.stderr.write(f"{clash}\n")
    sys.exit(2)

# Asked for anything after the run has ended, as by a thread that still waits for Serve, Ray would start a new
# cluster, with a whole dashboard, and leave it behind. It reads this when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

HOMES = {
    "AgentTrainer": "launch.training.trainer",
    "TrainConfig": "launch.settings.tree",
    "Workload": "launch.workload",
}
"""Modules of the public names, which are imported when a name is asked for."""
__all__ = ["AgentTrainer", "TrainConfig", "Workload"]


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
