"""Import of libraries that are large."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def large_imports() -> Iterator[None]:
    """Collect no garbage in the block, and never what it has made: a million modules, classes and functions.

    Walks over them, again and again while they came, were a quarter of the CPU time of the imports. A model
    is loaded after the block: its garbage is large.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report what is left at the end as leaked
        gc.enable()


@contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers in the block as where torch is not installed, unless this process has it already.

    A tokenizer needs none of it, and its import is 1 s of CPU time and 180 MB. For a process that has no
    models, before it has other threads that import: torch is missing for them in the block, and for
    transformers from then on.
    """
    if "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # of its own about torch
    cast(dict[str, Any], sys.modules)["torch"] = None
    try:
        yield
    finally:
        del sys.modules["torch"]
