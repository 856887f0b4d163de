"""Finds a folder or file of the user's that Python would take for one of Troupe's packages.

Imports nothing of Troupe's: it runs before them.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

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
