"""The ``.pt`` files of a checkpoint, which a worker reads as data: none of them can run code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from environments.errors import ConfigError

NUMPY_TYPES = (np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32)))
"""What the state of numpy's random generator is made of. Tensors and plain values torch allows by itself."""
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""The variable by which torch allows no other types, also where its caller asks for them."""


def read_state(path: str) -> Any:
    """The content of a file that ``torch.save`` wrote. Tensors are read from the disk when they are used.

    Raises:
        ConfigError: it holds other types than tensors, numpy's arrays and plain values, or is damaged.
    """
    with torch.serialization.safe_globals(list(NUMPY_TYPES)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise ConfigError(
                f"{path} is not the state of a learner, and was not loaded: {error} Start with a checkpoint "
                "that nobody has changed, or with a new run.directory."
            ) from error


@contextmanager
def read_as_data(paths: Sequence[str]) -> Iterator[None]:
    """In the block verl, which would run whatever code ``paths`` hold, loads them as ``read_state`` does.

    Raises:
        ConfigError: as ``read_state`` does, before the block begins.
    """
    for path in paths:
        read_state(path)
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(list(NUMPY_TYPES)):
            yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before
