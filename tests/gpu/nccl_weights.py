"""Weights by NCCL from one GPU to another, twice: the same bits, and the seconds of a gigabyte.

    python tests/gpu/nccl_weights.py

Rank and replica are processes of their own, without Ray's cluster and without an engine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from recording_engine import RecordingEngine

from actors.weights.nccl import NcclTransport
from policies.engines.weights import pack

NUM_TENSORS, ROWS, COLUMNS = 16, 4096, 8192
"""A gigabyte of bfloat16."""
VERSIONS = (1, 2)


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    for number in range(NUM_TENSORS):
        yield str(number), torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()


def be_the_rank(link: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    transport = NcclTransport()
    transport.open()
    for version in VERSIONS:
        link.send(list(transport.publish(version, list(pack(weights(version))), rank=0)))
        link.recv()


def be_the_replica(link: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    transport, engine = NcclTransport(), RecordingEngine()
    transport.open()
    for version in VERSIONS:
        pieces, start = link.recv(), time.perf_counter()
        asyncio.run(transport.fetch(version, pieces, engine))
        print(f"version {version}: {time.perf_counter() - start:.2f} s", flush=True)
        if not all(torch.equal(engine.loaded[name], each) for name, each in weights(version)):
            raise RuntimeError(f"Version {version} has other bits than were sent.")
        link.send(None)


def main() -> None:
    if torch.cuda.device_count() < 2:
        raise SystemExit("NCCL takes no two processes on one GPU, and torch finds fewer than two here.")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    rank = context.Process(target=be_the_rank, args=(here,), daemon=True)
    replica = context.Process(target=be_the_replica, args=(there,))
    rank.start()
    replica.start()
    replica.join()
    sys.exit(replica.exitcode)


if __name__ == "__main__":
    main()
