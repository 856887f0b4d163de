"""A sharded model and its optimizer, restored from the shards that any number of ranks have saved.

A saved shard says how the whole tensor was divided. Every rank puts the shards of all ranks together, one
tensor after the other, and keeps its own share. The files are read as data: none of them can run code.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from environments.errors import ConfigError
from policies.learning.verl import weights as verl_weights

NUMPY_TYPES = (np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32)))
"""Types in the state of numpy's random generator. Tensors and plain values torch allows by itself."""
_REMEDY = "Resume with the model.path that it was trained with."


def restore_model(module: torch.nn.Module, saved: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Fill all parameters and buffers of ``module``.

    Args:
        saved: what its ``state_dict`` was on each of the ranks that there were, in their order.

    Raises:
        ConfigError: they are of another model.
    """
    tensors = module.state_dict()
    if different := sorted(_shapes(tensors).items() ^ _shapes(saved[0]).items()):
        name, shape = different[0]
        raise ConfigError(
            f"The checkpoint is of another model: only one of the two has {name!r} of shape {shape}. "
            f"{_REMEDY}"
        )
    verl_weights.fill(tensors, lambda name: put_together([state[name] for state in saved]))


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore moments and numbers of steps of ``optimizer``. Its settings, such as betas, stay as they are:
    a run may be resumed with others.

    Args:
        saved: what its ``state_dict`` was on each of the ranks that there were, in their order.

    Raises:
        ConfigError: they are of another model.
    """
    sizes, saved_sizes = (
        [len(group["params"]) for group in each]
        for each in (optimizer.param_groups, saved[0]["param_groups"])
    )
    if sizes != saved_sizes:
        raise ConfigError(
            f"The checkpoint is of another model: it trains {sum(saved_sizes)} parameters, and this one "
            f"{sum(sizes)}. {_REMEDY}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            name: _share([each["state"][index][name] for each in saved], parameters[index])
            for name in saved[0]["state"][index]
        }
        for index in saved[0]["state"]
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _share(saved: Sequence[Any], parameter: torch.Tensor) -> Any:
    """Return one value of the state of ``parameter``: what is sharded as the parameter is, else all ranks'
    alike."""
    if not isinstance(saved[0], DTensor):
        return copy.deepcopy(saved[0])  # not the file's own memory
    tensor = torch.zeros_like(parameter, dtype=saved[0].dtype)
    verl_weights.take_share(tensor, put_together(saved))
    return tensor


def put_together(saved: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor of which ``saved`` are the shards of ranks 0, 1, 2, ..."""
    first = saved[0]
    if not isinstance(first, DTensor):
        return first
    shards = [verl_weights.local(shard) for shard in saved]
    return _joined(shards, first.device_mesh.mesh, first.placements)


def _joined(
    shards: Sequence[torch.Tensor], ranks: torch.Tensor, placements: Sequence[Placement]
) -> torch.Tensor:
    """The shards of ``ranks``, an array that has a dimension for each of ``placements``."""
    if not placements:
        return shards[int(ranks)]
    placement, *others = placements
    if isinstance(placement, Shard):
        return torch.cat([_joined(shards, part, others) for part in ranks], placement.dim)
    return _joined(shards, ranks[0], others)  # all of them have the same


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# -- files -------------------------------------------------------------------------------------------


class StateFiles:
    """Files that the ranks of a worker group have written to a folder: one for each rank and part of its
    state, which are ``model``, ``optim`` and ``extra_state``.

    Raises:
        ConfigError: the folder is not a whole checkpoint.
    """

    def __init__(self, folder: str) -> None:
        names = [path.name for path in Path(folder).glob("model_world_size_*_rank_0.pt")]
        if len(names) != 1:
            raise ConfigError(
                f"{folder} is not a whole checkpoint: it has {len(names)} files of rank 0, not 1."
            )
        self._folder = folder
        self.num_ranks = int(names[0].split("_")[3])
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
