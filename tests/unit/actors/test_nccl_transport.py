"""Weights by NCCL, whose pairs of processes are a fake here: two threads with a queue. No GPU has run it."""

from __future__ import annotations

import asyncio
import pickle
import queue
import socket
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from recording_engine import RecordingEngine, Tensors
from weight_shards import shards_of

from actors.weights import nccl
from actors.weights.nccl import NcclTransport
from actors.weights.transport import VersionGoneError, make_transport
from environments.errors import ConfigError
from policies.engines.weights import pack

if TYPE_CHECKING:
    import numpy as np


class FakePair:
    """Both sides meet at the port, as a group's do: before that, no other pair gets the port's queue."""

    sent: ClassVar[defaultdict[int, queue.Queue[Any]]] = defaultdict(queue.Queue)
    num_closed = 0

    def __init__(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        met = listener.accept()[0] if listener else socket.create_connection((host, port))
        met.close()
        self._queue = self.sent[port]

    def send(self, buffer: np.ndarray) -> None:
        self._queue.put(buffer.copy())

    def receive(self, num_bytes: int) -> np.ndarray:
        buffer: np.ndarray = self._queue.get(timeout=30)
        assert buffer.nbytes == num_bytes
        return buffer

    def close(self) -> None:
        FakePair.num_closed += 1


class FakeTransport(NcclTransport):
    pair = FakePair


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "get_node_ip_address", lambda: "127.0.0.1")


def weights(seed: int) -> Tensors:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(6, 50, generator=generator).bfloat16(), "scalar": torch.tensor(float(seed))}


def published(ranks: list[FakeTransport], version: int) -> list[Any]:
    """The pieces of ``weights(version)``, as Ray would bring them."""
    tensors = weights(version)
    shards = [shards_of(tensors, number, len(ranks)) for number in range(len(ranks))]
    buckets = [list(pack(each, bucket_bytes=256)) for each in shards]
    pieces = [
        offer for rank, each in enumerate(buckets) for offer in ranks[rank].publish(version, each, rank)
    ]
    for bucket in (bucket for each in buckets for bucket in each):
        bucket.buffer[:] = 0  # the memory is used again for the next version
    return list(pickle.loads(pickle.dumps(pieces)))


async def fetched(version: int, pieces: list[Any], num_replicas: int = 1) -> list[Tensors]:
    engines = [RecordingEngine() for _ in range(num_replicas)]
    await asyncio.gather(*(FakeTransport().fetch(version, pieces, each) for each in engines))
    assert {each.version for each in engines} == {version}
    return [each.loaded for each in engines]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_replicas_fetch_the_shards_of_all_ranks_when_they_like(num_ranks: int) -> None:
    import torch

    ranks, before = [FakeTransport() for _ in range(num_ranks)], FakePair.num_closed
    for version in (1, 2):
        pieces = published(ranks, version)
        for loaded in [*await fetched(version, pieces, 3), *await fetched(version, pieces)]:
            assert loaded.keys() == weights(version).keys()
            assert all(torch.equal(loaded[name], each) for name, each in weights(version).items())
    assert FakePair.num_closed - before >= 2 * 4 * num_ranks, "no group stays"


async def test_version_that_is_gone_and_lost_rank_are_told_by_an_error() -> None:
    rank = FakeTransport()
    first, second = published([rank], 1), published([rank], 2)
    with pytest.raises(VersionGoneError, match="Version 1 does not come by NCCL"):
        await fetched(1, first)
    assert rank._sender is not None
    rank._sender.key = "another"
    with pytest.raises(VersionGoneError, match="Version 2 does not come"):
        await fetched(2, second)
    rank._sender.shutdown()
    rank._sender.server_close()
    with pytest.raises(VersionGoneError, match="refused"):
        await fetched(2, second)


def test_transport_by_nccl_is_refused_without_a_gpu(tmp_path: Any) -> None:
    transport = make_transport({"transport": "nccl"}, str(tmp_path), "training")
    with pytest.raises(
        ConfigError, match=rf"transport=nccl needs a GPU .*{socket.gethostname()}: use object"
    ):
        transport.open()


@pytest.mark.parametrize(("use", "remedy"), [((True, False), "server.colocated=true"), ((False, True), "=0")])
def test_run_that_nccl_does_not_serve_is_refused(use: tuple[bool, bool], remedy: str) -> None:
    """Two processes on one GPU; an evaluation that goes on with a version of which no rank has anything."""
    NcclTransport.check_use(False, False)
    with pytest.raises(ConfigError, match=remedy):
        NcclTransport.check_use(*use)
