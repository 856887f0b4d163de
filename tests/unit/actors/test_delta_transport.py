"""Weights as changes to a whole version: the same to the last bit, and checked."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_engine import RecordingEngine, Tensors
from weight_shards import shards_of

from actors.weights.deltas import DeltaTransport, Part
from actors.weights.transport import WeightTransportError, make_transport
from environments.errors import ConfigError
from policies.engines.weights import pack

if TYPE_CHECKING:
    import torch


def weights(seed: int, share: float = 0.01) -> Tensors:
    """Tensors of several types, of which ``share`` of the elements are others for each ``seed``."""
    import torch

    generator = torch.Generator().manual_seed(0)
    first = {
        "matrix": torch.randn(500, 300, generator=generator).bfloat16(),
        "vector": torch.randn(300, generator=generator),
        "scalar": torch.tensor(1.5),
        "ids": torch.arange(9),
    }
    generator.manual_seed(seed)
    for name in ("matrix", "vector"):
        differs = torch.rand(first[name].shape, generator=generator) < share * (seed > 0)
        first[name][differs] = torch.randn(int(differs.sum()), generator=generator).to(first[name].dtype)
    return first


def assert_equal(found: Tensors, expected: Tensors) -> None:
    import torch

    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(_bytes(found[name]), _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


class Pieces:
    """Stands for Ray's object store: ``keep`` gets references, which are awaited."""

    def __init__(self, whole_every: int = 3, num_ranks: int = 2) -> None:
        self.ranks = [DeltaTransport(whole_every=whole_every) for _ in range(num_ranks)]
        self.store = DeltaTransport(whole_every=whole_every)

    def publish(self, version: int, tensors: Tensors) -> list[Part]:
        written = []
        for rank, transport in enumerate(self.ranks):
            own = list(pack(shards_of(tensors, rank, len(self.ranks))))
            written += [pickle.loads(pickle.dumps(each)) for each in transport.publish(version, own, rank)]
        return kept(self.store, version, written)


def kept(store: DeltaTransport, version: int, pieces: Iterable[Part]) -> list[Part]:
    async def keep() -> list[Part]:
        futures = []
        for piece in pieces:
            futures.append(asyncio.get_running_loop().create_future())
            futures[-1].set_result(piece)
        return [await each for each in await store.keep(version, futures)]

    return asyncio.run(keep())


def fetched(replica: DeltaTransport, version: int, pieces: Sequence[Part]) -> Tensors:
    engine = RecordingEngine()
    asyncio.run(replica.fetch(version, pieces, engine))
    assert engine.version == version
    return engine.loaded


def num_bytes(pieces: Iterable[Part]) -> int:
    return sum(len(each.bucket.buffer) for each in pieces if each.bucket is not None)


def test_changes_restore_each_version_to_the_last_bit() -> None:
    pieces, replica = Pieces(), DeltaTransport()
    for version in range(1, 8):
        published = pieces.publish(version, weights(version))
        assert {each.base for each in published} == {(version - 1) // 3 * 3 + 1}
        assert_equal(fetched(replica, version, published), weights(version))
        assert_equal(fetched(DeltaTransport(), version, published), weights(version))  # it starts late


def test_little_that_has_changed_takes_few_bytes() -> None:
    pieces = Pieces(num_ranks=1)
    whole = pieces.publish(1, weights(0))
    changes = [each for each in pieces.publish(2, weights(1)) if each.version == 2]
    assert num_bytes(changes) < 0.05 * num_bytes(whole)
    again = [each for each in pieces.publish(3, weights(0)) if each.version == 3]
    assert num_bytes(again) < 0.01 * num_bytes(whole)


def test_weights_that_have_all_changed_are_written_whole() -> None:
    pieces = Pieces(num_ranks=1)
    whole = pieces.publish(1, weights(0))
    published = pieces.publish(2, weights(1, share=1))
    assert num_bytes(each for each in published if each.version == 2) < 1.01 * num_bytes(whole)
    assert_equal(fetched(DeltaTransport(), 2, published), weights(1, share=1))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20),
    st.integers(0, 2**17 + 5),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_any_bits_at_any_place_arrive(patterns: list[int], start: int, dtype: str) -> None:
    import numpy as np
    import torch

    before = np.zeros(start + len(patterns), np.uint16)
    after = before.copy()
    after[start:] = patterns  # not a number, infinite, -0 and all others
    pieces, replica = Pieces(num_ranks=1), DeltaTransport()
    for version, bits in enumerate((before, after), 1):
        tensors = {"weight": torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype))}
        assert_equal(fetched(replica, version, pieces.publish(version, tensors)), tensors)


def damaged(published: list[Part], version: int, name: str) -> list[Part]:
    """The parts of ``version`` with another bit in the tensor ``name``."""
    parts = []
    for part in published:
        if part.bucket is not None and part.version == version:
            tensors = {key: tensor.clone() for key, tensor in part.bucket.shards()}
            if name in tensors:
                _bytes(tensors[name])[-2] ^= 1
            part = part._replace(bucket=next(pack(tensors.items())))
        parts.append(part)
    return parts


@pytest.mark.parametrize("end", ["gaps", "values", "checksum"])
def test_wrong_checksum_names_version_and_weight(end: str) -> None:
    pieces = Pieces()
    pieces.publish(7, weights(0))
    published = damaged(pieces.publish(8, weights(1)), 8, f"matrix|0/500|{end}")
    engine = RecordingEngine()
    with pytest.raises(WeightTransportError, match=r"Version 8 .* matrix\|0/500 than .*run\.resume"):
        asyncio.run(DeltaTransport().fetch(8, published, engine))
    assert engine.version == 0, "nothing of it was loaded"


def test_changes_to_another_whole_version_are_not_applied() -> None:
    pieces = Pieces()
    pieces.publish(1, weights(0))
    other = [*Pieces().publish(1, weights(3)), *(e for e in pieces.publish(2, weights(1)) if e.version == 2)]
    with pytest.raises(WeightTransportError, match=r"Version 2 .* matrix\|0/\d+ than was published"):
        fetched(DeltaTransport(), 2, other)


def test_store_without_the_whole_version_refuses_changes() -> None:
    pieces = Pieces(num_ranks=1)
    pieces.publish(1, weights(0))
    written = list(pieces.ranks[0].publish(2, list(pack(weights(1).items())), rank=0))
    with pytest.raises(WeightTransportError, match=r"Version 2 .* changes to version 1.*run\.resume=true"):
        kept(DeltaTransport(), 2, written)


def test_evaluation_s_store_takes_over_all_that_a_version_needs() -> None:
    pieces = Pieces()
    pieces.publish(1, weights(0))
    pinned = kept(DeltaTransport(), 2, pieces.publish(2, weights(1)))
    assert_equal(fetched(DeltaTransport(), 2, pinned), weights(1))


def test_learner_that_is_rebuilt_begins_with_a_whole_version() -> None:
    pieces = Pieces()
    for version in (1, 2):
        pieces.publish(version, weights(version))
    pieces.ranks = [DeltaTransport() for _ in pieces.ranks]
    assert {each.base for each in pieces.publish(3, weights(3))} == {3}


class OwnDeltas(DeltaTransport):
    """A user's transport, made of this one."""


def test_copies_for_other_processes_hold_no_weights() -> None:
    rank = OwnDeltas(whole_every=5)
    list(rank.publish(1, list(pack(weights(0).items())), rank=0))
    there: Any = pickle.loads(pickle.dumps(rank))
    assert rank._tensors and type(there) is OwnDeltas
    assert (there._whole_every, there._num_published, there._tensors) == (5, 0, {})


def test_weights_of_float32_and_no_interval_are_refused() -> None:
    DeltaTransport.check_dtype("bfloat16")
    with pytest.raises(ConfigError, match=r"transport=deltas needs .*dtype=bfloat16"):
        DeltaTransport.check_dtype(None)
    for number in (0, 2.5, "x"):
        with pytest.raises(ConfigError, match=rf"server\.weights\.whole_every={number} has to be a whole"):
            make_transport({"transport": "deltas", "whole_every": number}, "runs/a", "training")
