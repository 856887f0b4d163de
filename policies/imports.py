"""Import of libraries that are large."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
