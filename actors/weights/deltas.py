"""Weights as what has changed since a whole version, through Ray's object store.

    version     41 (whole)   42        43        44       ...   57 (whole)
    pieces      all          41..42    41..43    41..44         all

Changes are those since the newest whole version, not since the version before: a replica needs that one and
the newest version's pieces, whichever versions it has served. The store adds the whole version to each, so
that one that starts late fetches both; the others have it on their node already.

This pays for weights of two bytes and small steps: an update moves a weight by about the learning rate, which
a bfloat16 of two digits rarely shows.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from actors.weights.transport import WeightTarget, WeightTransport, WeightTransportError
from environments.errors import ConfigError
from policies.engines.weights import WeightBucket, pack

if TYPE_CHECKING:
    import numpy as np
    import ray
    import torch

CHECKSUM, *ENDS = "|checksum", "|gaps", "|values"
"""Ends of names in a bucket of changes: of a weight's result, and of its elements that have changed."""
LARGEST_GAP = 2**16 - 1


class Part(NamedTuple):
    """A piece of a version."""

    version: int
    base: int
    """The whole version that the changes are to; the same as ``version`` where that is whole."""
    bucket: WeightBucket | None
    """``None`` in the first one, from which a store takes the rest."""


class DeltaTransport(WeightTransport):
    """Writes a whole version now and then, and for the others the elements whose bits are not as in that one.

    A weight of which too much has changed is written whole. A checksum of each weight is compared before the
    engine is touched. A rank keeps a copy of its share of the whole version.

    Args:
        whole_every: versions from one whole one to the next.

    Raises:
        ConfigError: there is no such number.
    """

    def __init__(self, folder: str = "", whole_every: int = 16) -> None:
        if not isinstance(whole_every, int) or whole_every < 1:
            raise ConfigError(f"server.weights.whole_every={whole_every} has to be a whole number from 1 on.")
        self._whole_every = whole_every
        self._num_published = 0
        """Versions since the whole one, with it. In a rank."""
        self._base = -1
        self._tensors: dict[str, torch.Tensor] = {}
        """The newest whole version, in a rank (its share) or in a replica (where it stays on its node)."""
        self._whole: Sequence[ray.ObjectRef] = ()
        """Pieces of the newest whole version, in a store."""

    def __reduce__(self) -> tuple[type[DeltaTransport], tuple[str, int]]:
        return type(self), ("", self._whole_every)  # what one process has is not another's

    @classmethod
    def check_dtype(cls, dtype: str | None) -> None:
        if dtype is None:
            raise ConfigError(
                "server.weights.transport=deltas needs engines whose dtype has two bytes: an update changes "
                "nearly every weight of float32. Set server.engine.options.dtype=bfloat16, or leave the "
                "transport out."
            )

    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> Iterator[Part]:
        is_whole = self._num_published % self._whole_every == 0
        if is_whole:
            self._base, self._tensors = version, {}
        if rank == 0:
            yield Part(version, self._base, None)
        shards = (each for bucket in buckets for each in bucket.shards())
        for bucket in buckets if is_whole else pack(_changes(shards, self._tensors)):
            yield Part(version, self._base, bucket)
            if is_whole:
                self._tensors |= {name: tensor.clone() for name, tensor in bucket.shards()}
        self._num_published += 1

    async def keep(self, version: int, pieces: Sequence[ray.ObjectRef]) -> Sequence[ray.ObjectRef]:
        first: Part = await pieces[0]
        if first.version == first.base:
            self._base, self._whole = first.base, pieces
            return pieces
        if first.base != self._base:
            raise WeightTransportError(
                f"Version {version} of the weights is changes to version {first.base}, and the store has "
                f"{self._base}: go on from the newest checkpoint with run.resume=true."
            )
        return [*self._whole, *pieces]

    async def fetch(self, version: int, pieces: Sequence[Part], engine: WeightTarget) -> None:
        whole = [each.bucket for each in pieces if each.bucket and each.version == each.base]
        self._tensors = {name: tensor for bucket in whole for name, tensor in bucket.shards()}
        changes = [each.bucket for each in pieces if each.bucket and each.version != each.base]
        if changes:
            whole = await asyncio.to_thread(lambda: list(pack(_restored(version, self._tensors, changes))))
        await engine.load_weights(version, whole)


def _changes(
    tensors: Iterable[tuple[str, torch.Tensor]], base: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checksum of each weight, and the smaller one of itself and what has changed since ``base``."""
    import numpy as np
    import torch

    for name, tensor in tensors:
        yield name + CHECKSUM, torch.tensor(_checksum(tensor))
        differs = _bits(tensor) != _bits(base[name])
        differs[::LARGEST_GAP] = True  # so that each gap fits into two bytes
        places = np.flatnonzero(differs)
        if len(places) * (2 + tensor.itemsize) >= tensor.nbytes:
            yield name, tensor
        else:
            gaps = np.diff(places, prepend=0).astype(np.uint16)
            values = tensor.flatten()[torch.from_numpy(places)]
            yield from zip((name + end for end in ENDS), (torch.from_numpy(gaps), values), strict=True)


def _restored(
    version: int, base: Mapping[str, torch.Tensor], changes: Sequence[WeightBucket]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a version.

    Raises:
        WeightTransportError: one is not what was published.
    """
    parts = {name: tensor for bucket in changes for name, tensor in bucket.shards()}
    for key, checksum in parts.items():
        if not key.endswith(CHECKSUM):
            continue
        name = key.removesuffix(CHECKSUM)
        try:
            tensor = parts[name] if name in parts else _changed(base[name], *(parts[name + e] for e in ENDS))
            found: object = _checksum(tensor)
        except (LookupError, RuntimeError) as error:
            found = error
        if found != checksum.item():
            raise WeightTransportError(
                f"Version {version} of the weights has another {name} than was published: its checksum is "
                f"{found} and not {checksum.item()}. Go on from the newest checkpoint with run.resume=true."
            )
        yield name, tensor


def _changed(base: torch.Tensor, gaps: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    tensor = base.clone()
    tensor.view(-1)[gaps.long().cumsum(0)] = values
    return tensor


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements as integers: so -0 is not 0, and what is no number is equal to itself."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(f"i{tensor.itemsize}")


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(_bits(tensor).data)
