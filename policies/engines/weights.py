"""Weights on their way from the learner to the engines: shards in flat buffers, and whole tensors of them.

A shard is some rows of a tensor, and its name says which: ``model.norm.weight|288/576`` begins at row 288 of
576. A tensor that is whole has its own name. Those who carry weights need not know the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from environments.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    import torch

BUCKET_BYTES = 64 << 20
ALIGNMENT = 64
"""Offsets are multiples of this many bytes, so that any dtype can be viewed in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """Place of one tensor in its bucket. ``offset`` and ``num_bytes`` are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """Some tensors in one uint8 buffer, which Ray's object store shares without a copy."""

    places: tuple[TensorPlace, ...]
    buffer: np.ndarray

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The shards as views of the buffer."""
        import torch

        flat = torch.frombuffer(self.buffer.data, dtype=torch.uint8)
        for place in self.places:
            raw = flat[place.offset : place.offset + place.num_bytes]
            yield place.name, raw.view(getattr(torch, place.dtype)).view(place.shape)


def shard_name(name: str, start: int, num_rows: int) -> str:
    """Name of a shard that begins at the row ``start`` of a tensor of ``num_rows``."""
    return f"{name}|{start}/{num_rows}"


class WholeTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a version by name, each put together from its shards when it is read.

    Raises:
        WeightsError: a shard is missing.
    """

    def __init__(self, buckets: Sequence[WeightBucket]) -> None:
        self._shards: dict[str, dict[int, torch.Tensor]] = {}
        sizes: dict[str, int] = {}
        for shard_of, tensor in (each for bucket in buckets for each in bucket.shards()):
            name, _, place = shard_of.partition("|")
            start, _, num_rows = place.partition("/")
            self._shards.setdefault(name, {})[int(start or 0)] = tensor
            if num_rows:
                sizes[name] = int(num_rows)
        for name, size in sizes.items():
            there = sum(map(len, self._shards[name].values()))
            if there != size:
                raise WeightsError(
                    f"The published weights have {there} of the {size} rows of {name}: `publish` of the "
                    "transport has to write the shards of every rank."
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        shards = self._shards[name]
        return shards[0] if len(shards) == 1 else torch.cat([shards[start] for start in sorted(shards)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[WeightBucket]:
    """Copy ``tensors`` into buckets of at most ``bucket_bytes``; a larger tensor has one of its own.

    Args:
        dtype: for the matrices of floating-point numbers that are wider. Vectors keep theirs: engines hold
            some in float32 whatever their dtype is, such as a router's corrections.
    """
    import numpy as np
    import torch

    places: list[TensorPlace] = []
    buffer, size = np.empty(0, np.uint8), 0
    for name, tensor in tensors:
        is_wider = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        own = dtype if dtype is not None and is_wider and tensor.dim() > 1 else tensor.dtype
        num_bytes = tensor.numel() * own.itemsize
        if places and size + num_bytes > bucket_bytes:
            yield WeightBucket(places=tuple(places), buffer=buffer[:size])
            places = []
        if not places:
            buffer, size = np.empty(max(bucket_bytes, num_bytes), np.uint8), 0
        copy = torch.from_numpy(buffer[size : size + num_bytes]).view(own)
        copy.view(tensor.shape).copy_(tensor.detach())
        named, shape = str(own).removeprefix("torch."), tuple(tensor.shape)
        places.append(TensorPlace(name=name, dtype=named, shape=shape, offset=size, num_bytes=num_bytes))
        size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if places:
        yield WeightBucket(places=tuple(places), buffer=buffer[:size])
