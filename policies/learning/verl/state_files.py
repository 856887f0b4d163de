"""The ``.pt`` files of a checkpoint, which a worker reads as data: none of them can run code."""

from __future__ import annotations

import glob
import os
import pickle
import re
from typing import Any

import numpy as np
import torch

from environments.errors import ConfigError

NUMPY_TYPES = (np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32)))
"""Types in the state of numpy's random generator. Tensors and plain values torch allows by itself."""


class StateFiles:
    """Files that the ranks of a worker group have written to a folder: one for each rank and part of its
    state, which are ``model``, ``optim`` and ``extra_state``.

    Raises:
        ConfigError: the folder is not a whole checkpoint.
    """

    def __init__(self, folder: str) -> None:
        paths = glob.glob(os.path.join(glob.escape(folder), "model_world_size_*_rank_0.pt"))
        if len(paths) != 1:
            raise ConfigError(
                f"{folder} is not a whole checkpoint: it has {len(paths)} files of rank 0, not 1."
            )
        found = re.search(r"world_size_(\d+)_rank", os.path.basename(paths[0]))
        assert found is not None
        self._folder = folder
        self.num_ranks = int(found.group(1))
        """Number of ranks that wrote the checkpoint."""

    def of_rank(self, part: str, rank: int) -> Any:
        """A part of one rank's state. Raises as ``read_state`` does."""
        name = f"{part}_world_size_{self.num_ranks}_rank_{rank}.pt"
        return read_state(os.path.join(self._folder, name))

    def of_all_ranks(self, part: str) -> list[Any]:
        """A part of every rank's state, in their order. Raises as ``read_state`` does."""
        return [self.of_rank(part, rank) for rank in range(self.num_ranks)]


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
