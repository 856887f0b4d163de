"""State of a sharded model: each rank copies and writes its own part, and any number of ranks read theirs.

A file of a rank has the place of each of its shards in the whole tensor, so a rank reads what overlaps its
own shards and nothing else. All files are read as data: none of them can run code.
"""

from __future__ import annotations

import glob
import json
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from environments.disk import FileDigest, sync
from environments.errors import ConfigError
from policies.learning.verl import weights as verl_weights
from policies.learning.verl.four_bits import numbers_in

MODEL, OPTIMIZER, REFERENCE = "model/", "optimizer/", "reference/"
"""Beginnings of the names of tensors, by the part of the state that they belong to."""
PLACES = "places"
OPEN_BYTES = 2**26
"""Bytes that are read of open files before they are closed."""
NUMPY_TYPES = (np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32)))
"""Types in the state of numpy's random generator. Tensors and plain values torch allows by itself."""
_REMEDY = "Resume with the model.path and the learner.verl.model that it was trained with."


def restore_model(module: torch.nn.Module, saved: ShardFiles) -> None:
    """Fill all parameters and buffers of ``module``.

    Raises:
        ConfigError: the saved ones are of another model.
    """
    tensors = model_state(module)
    present = {(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    there = {(name, tuple(shape)) for name, shape in saved.shapes.items() if name.startswith(MODEL)}
    if different := sorted(present ^ there):
        name, shape = different[0]
        raise ConfigError(
            f"The checkpoint is of another model: only one of the two has {name.removeprefix(MODEL)!r} of "
            f"shape {shape}. {_REMEDY}"
        )
    for name, tensor in tensors.items():
        saved.fill(name, tensor)


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: ShardFiles) -> None:
    """Restore moments and numbers of steps of ``optimizer``. Its settings, such as betas, stay as they are:
    a run may be resumed with others.

    Raises:
        ConfigError: the saved ones are of another model.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, shape in saved.shapes.items():
        if not name.startswith(OPTIMIZER):
            continue
        index, key = _index_and_key(name)
        parameter = parameters[index] if index < len(parameters) else None
        if parameter is None or (shape and tuple(shape) != tuple(parameter.shape)):
            raise ConfigError(f"The checkpoint is of another model: it trains other parameters. {_REMEDY}")
        dtype = saved.dtype(name)
        value = torch.zeros_like(parameter, dtype=dtype) if shape else torch.zeros((), dtype=dtype)
        saved.fill(name, value)
        state.setdefault(index, {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if not type(optimizer).__module__.startswith("torch."):
        _take_own_form(optimizer)


@torch.no_grad()
def _take_own_form(optimizer: torch.optim.Optimizer) -> None:
    """Put the moments of an optimizer into tensors of its own, such as torchao's of eight bits: those that it
    makes in a step of a learning rate of 0.
    """
    loaded, groups = dict(optimizer.state), optimizer.param_groups
    before = [dict(group) for group in groups]
    optimizer.state.clear()
    for parameter in loaded:
        parameter.grad = torch.zeros_like(parameter)
    for group in groups:
        group["lr"] = 0 * group["lr"]
    optimizer.step()
    optimizer.zero_grad()
    for group, settings in zip(groups, before, strict=True):
        group.update(settings)
    for parameter, values in loaded.items():
        state = optimizer.state[parameter]
        for key, own in state.items():
            if isinstance(own, torch.Tensor):
                verl_weights.local(own).copy_(verl_weights.local(values[key]))
            else:  # the number of steps may be a plain one
                state[key] = type(own)(values[key].item())


def _index_and_key(name: str) -> tuple[int, str]:
    _, index, key = name.split("/")
    return int(index), key


def model_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of ``module``, sharded as they are, each under the first of its names.

    All ranks have the same names: a shard does not decide, since it may be empty.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (MODEL + name, tensor))
    return dict(found.values())


def optimizer_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Moments and numbers of steps in the ``state_dict`` of an optimizer."""
    return {
        f"{OPTIMIZER}{index}/{key}": torch.as_tensor(value)
        for index, values in state["state"].items()
        for key, value in values.items()
    }


# -- files of safetensors ------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a rank's shard in a whole tensor."""

    whole: Sequence[int]
    """Shape of the whole tensor."""
    start: Sequence[int]
    shape: Sequence[int]


class StateCopy:
    """Copy of a rank's part of a state, in host memory: it stays as it is while the rank learns.

    Of what several ranks have alike, the first of them has it. A parameter that is not trained stays as it is
    without a copy.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, Place] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of ``tensors``."""
        for name, tensor in tensors.items():
            own = verl_weights.local(tensor).detach()
            if (own.numel() or not tensor.numel()) and is_first_with(tensor):
                self._places[name] = _place(tensor)
                if is_traceable_wrapper_subclass(own):  # moments of few bits, by their blocks' scales
                    own = own.dequantize()
                is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
                self._tensors[name] = own.to("cpu", copy=not is_frozen).contiguous()

    def write(self, folder: str) -> dict[str, FileDigest]:
        """Write the part to a file of this rank. Raises as ``write_tensors`` does."""
        name = _file_name(dist.get_rank(), dist.get_world_size())
        return write_tensors(self._tensors, os.path.join(folder, name), {PLACES: json.dumps(self._places)})


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str]
) -> dict[str, FileDigest]:
    """Write ``tensors`` to ``path`` and to the disk; return the digest of the file, by ``path``.

    Raises:
        OSError: it could not be written; names it.
    """
    return _written(path, lambda: save_file(dict(tensors), path, dict(metadata)))


def write_in_turn(
    layout: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor], path: str
) -> dict[str, FileDigest]:
    """Write tensors in Hugging Face's form as ``write_tensors`` does, each as it comes: memory holds one.

    Args:
        layout: what they are like, by name: tensors that need no memory, those of the widest numbers first.
        tensors: the tensors themselves in that order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in layout.items():
        begin, end = end, end + like.nbytes
        dtype = str(like.dtype).removeprefix("torch.").replace("float", "F").replace("uint", "U")
        dtype = dtype.replace("int", "I").upper()  # the format's name, such as BF16
        header[name] = {"dtype": dtype, "shape": [*like.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write() -> None:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy())

    return _written(path, write)


def _written(path: str, write: Callable[[], None]) -> dict[str, FileDigest]:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write()
        sync(Path(path))
        return {path: FileDigest.of(Path(path))}
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} could not be written: {error}") from error


def _file_name(rank: int, num_ranks: int) -> str:
    return f"state_{rank:05d}_of_{num_ranks:05d}.safetensors"


def _place(tensor: torch.Tensor) -> Place:
    if not isinstance(tensor, DTensor):
        return Place(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Place(tuple(tensor.shape), tuple(start), tuple(shape))


def flat_start(tensor: torch.Tensor) -> int:
    """Place of this rank's shard, of rows as FSDP2 makes it, among the weights of the whole tensor."""
    place = _place(tensor)
    row = math.prod(place.whole[1:]) * numbers_in(tensor)
    return place.start[0] * row if place.whole else 0


def is_first_with(tensor: torch.Tensor) -> bool:
    """True if no rank before this one has the same shard of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return not any(
        coordinate
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
        if not isinstance(placement, Shard)
    )


class ShardFiles:
    """Files that ``StateCopy`` has written to a folder. To open one takes longer the more tensors it has, and
    what has been read of an open one counts as memory of the process: they are closed after ``OPEN_BYTES``.

    Raises:
        ConfigError: the folder is not a whole checkpoint, or a file is damaged.
    """

    def __init__(self, folder: str) -> None:
        first = glob.glob(os.path.join(glob.escape(folder), "state_00000_of_*.safetensors"))
        if len(first) != 1:
            found = f"it has {len(first)} files state_00000_of_*.safetensors, not 1."
            raise ConfigError(_not_loaded(folder, found))
        self.num_ranks = int(first[0].removesuffix(".safetensors").rpartition("_")[2])
        self.shapes: dict[str, Sequence[int]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._pieces: dict[str, list[tuple[str, Place]]] = {}
        self._opened: dict[str, Any] = {}
        self._num_read = 0
        for rank in range(self.num_ranks):
            path = os.path.join(folder, _file_name(rank, self.num_ranks))
            with _damage_explained(path), safe_open(path, "pt") as file:
                for name, place in json.loads(file.metadata()[PLACES]).items():
                    self.shapes[name] = place[0]
                    part = file.get_slice(name)[:0] if place[0] else file.get_tensor(name)
                    self._dtypes[name] = part.dtype
                    self._pieces.setdefault(name, []).append((path, Place(*place)))
        for name, shape in self.shapes.items():
            places = {str(place): place for _, place in self._pieces[name]}.values()
            if (there := sum(math.prod(each.shape) for each in places)) != math.prod(shape):
                missing = f"it has {there} of the {math.prod(shape)} numbers of {name!r}."
                raise ConfigError(_not_loaded(folder, missing))

    def _open(self, path: str) -> Any:
        if self._num_read > OPEN_BYTES:
            self._opened.clear()
            self._num_read = 0
        if path not in self._opened:
            self._opened[path] = safe_open(path, "pt")
        return self._opened[path]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    @torch.no_grad()
    def fill(self, name: str, tensor: torch.Tensor) -> None:
        own, mine = verl_weights.local(tensor), _place(tensor)
        for path, place in self._pieces[name]:
            begin = [max(*each) for each in zip(mine.start, place.start, strict=True)]
            end = [min(*each) for each in zip(_ends(mine), _ends(place), strict=True)]
            if not all(one < other for one, other in zip(begin, end, strict=True)):
                continue
            file = self._open(path)
            whole = file.get_slice(name) if place.shape else file.get_tensor(name)
            piece = whole[_box(begin, end, place.start)]
            own[_box(begin, end, mine.start)].copy_(piece)
            self._num_read += piece.nbytes

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        tensor = torch.empty(tuple(self.shapes[name]), dtype=self.dtype(name))
        self.fill(name, tensor)
        return tensor

    def names_for(self, rank: int) -> list[str]:
        """Names of the model's tensors that ``rank`` has to export: as many bytes as of the others."""
        sizes = {name: math.prod(each) for name, each in self.shapes.items() if name.startswith(MODEL)}
        total, before, names = sum(sizes.values()), 0.0, []
        for name, size in sizes.items():
            if int((before + size / 2) * self.num_ranks / total) == rank:
                names.append(name.removeprefix(MODEL))
            before += size
        return names


def _ends(place: Place) -> list[int]:
    return [start + size for start, size in zip(place.start, place.shape, strict=True)]


def _box(begin: Iterable[int], end: Iterable[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(one - zero, other - zero) for one, other, zero in zip(begin, end, origin, strict=True))


@contextmanager
def _damage_explained(path: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(_not_loaded(path, error)) from error


def _not_loaded(path: str, error: Exception | str) -> str:
    return (
        f"{path} is not the state of a learner, and was not loaded: {error} Start with a checkpoint that "
        "nobody has changed, or with a new run.directory."
    )


def extra_state(folder: str, rank: int, num_ranks: int) -> Any:
    """Schedule and random generators of a rank, in a file of ``torch.save``.

    Raises:
        ConfigError: it holds other types than tensors, numpy's arrays and plain values, or is damaged.
    """
    path = os.path.join(folder, f"extra_state_world_size_{num_ranks}_rank_{rank}.pt")
    with torch.serialization.safe_globals(list(NUMPY_TYPES)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise ConfigError(_not_loaded(path, error)) from error
