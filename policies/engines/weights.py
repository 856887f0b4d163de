"""Weights on their way from the learner to the engines: flat byte buffers and what lies where in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as views of the buffer."""
        import torch

        flat = torch.frombuffer(self.buffer.data, dtype=torch.uint8)
        for place in self.places:
            raw = flat[place.offset : place.offset + place.num_bytes]
            yield place.name, raw.view(getattr(torch, place.dtype)).view(place.shape)


def share_of(
    tensors: Iterable[tuple[str, torch.Tensor]], rank: int, num_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of which ``rank`` takes care: each goes to the one that has the fewest bytes so far."""
    sizes = [0] * num_ranks
    for name, tensor in tensors:
        least = sizes.index(min(sizes))
        sizes[least] += tensor.nbytes
        if least == rank:
            yield name, tensor


def narrowed(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Cast the matrices of floating-point numbers that are wider than ``dtype``; none if that is None.

    Vectors stay: engines hold some in float32 whatever their dtype is, such as a router's corrections.
    """
    for name, tensor in tensors:
        is_wider = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        yield name, tensor.to(dtype) if is_wider and tensor.dim() > 1 else tensor


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """Pack ``tensors`` into buckets of at most ``bucket_bytes``; a larger tensor has one of its own."""
    import numpy as np
    import torch

    places: list[TensorPlace] = []
    buffer, size = np.empty(0, np.uint8), 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if places and size + num_bytes > bucket_bytes:
            yield WeightBucket(places=tuple(places), buffer=buffer[:size])
            places = []
        if not places:
            buffer, size = np.empty(max(bucket_bytes, num_bytes), np.uint8), 0
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        buffer[size : size + num_bytes] = raw  # at once: the next one is gathered without this one
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        places.append(TensorPlace(name=name, dtype=dtype, shape=shape, offset=size, num_bytes=num_bytes))
        size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if places:
        yield WeightBucket(places=tuple(places), buffer=buffer[:size])
