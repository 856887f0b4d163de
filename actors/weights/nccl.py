"""Weights by NCCL, from the learner's GPUs to those of the replicas. Nobody has run this on a GPU."""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

from ray.util import get_node_ip_address

from actors.weights.transport import VersionGoneError, WeightTarget, WeightTransport
from environments.errors import ConfigError
from policies.engines.weights import TensorPlace, WeightBucket

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.distributed.utils import StatelessProcessGroup

SECONDS = 60.0
"""Seconds in which a bucket has to arrive: NCCL itself waits for ever for a process that is gone."""


class NcclPair:
    """A group as vLLM's own transfer of weights has, of two processes on two GPUs: that with the
    ``listener``, which is bound to the port, sends to the other.
    """

    def __init__(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self._device = torch.device("cuda", torch.cuda.current_device())
        self._group = PyNcclCommunicator(meet(host, port, listener), device=self._device)
        if self._group.disabled:
            raise RuntimeError("vLLM finds no NCCL.")
        self._stream = torch.cuda.Stream(self._device)
        """Stream of its own: what engine or learner computes does not wait for the other side."""

    def send(self, buffer: np.ndarray) -> None:
        """Send a buffer of uint8."""
        import torch

        with torch.cuda.stream(self._stream):
            self._broadcast(torch.from_numpy(buffer).to(self._device))

    def receive(self, num_bytes: int) -> np.ndarray:
        """Receive a buffer of so many bytes."""
        import torch

        with torch.cuda.stream(self._stream):
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._broadcast(staged)
            return staged.cpu().numpy()

    def close(self) -> None:
        """End the group, whatever it is waiting for."""
        self._group.destroy()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        import torch

        deadline, done = time.monotonic() + SECONDS, torch.cuda.Event()
        self._group.broadcast(tensor, src=0, stream=self._stream)
        done.record(self._stream)
        while not done.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"NCCL has not brought a bucket in {SECONDS:g} s.")
            time.sleep(0.001)


def meet(host: str, port: int, listener: socket.socket | None = None) -> StatelessProcessGroup:
    """Meet the other process. vLLM's own function would wait for it for 5 minutes, and bind the port itself,
    which another program may have by then.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    rank, seconds = int(listener is None), math.ceil(SECONDS)
    return StatelessProcessGroup.create(host, port, rank, 2, store_timeout=seconds, listen_socket=listener)


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank's shards of a version: where and with which key to get them, and the places of each bucket."""

    host: str
    port: int
    key: str
    buckets: Sequence[tuple[tuple[TensorPlace, ...], int]]


class NcclTransport(WeightTransport):
    """Each rank sends its shards of the newest version to every replica that connects, one at a time or many.

    They lie on the host before and afterwards, and a bucket on the GPUs between: so nobody waits for a
    replica, and engines load them as they do those of another transport. A version ends with its ranks.
    """

    pair: Any = NcclPair

    def __init__(self, folder: str = "") -> None:
        self._sender: _Sender | None = None

    @classmethod
    def check_use(cls, shares_devices: bool, pins_versions: bool) -> None:
        if shares_devices:
            raise ConfigError(
                "server.weights.transport=nccl with server.colocated=true: NCCL takes no two processes on "
                "one GPU. Leave one of the two out."
            )
        if pins_versions:
            raise ConfigError(
                "server.weights.transport=nccl sends the newest version alone, and evaluation.num_replicas "
                "are engines that go on with an older one. Set evaluation.num_replicas=0, or leave the "
                "transport out."
            )

    def open(self) -> None:
        import torch

        if not torch.cuda.device_count():
            raise ConfigError(
                f"server.weights.transport=nccl needs a GPU for each rank and replica, and torch "
                f"{torch.__version__} finds none on {socket.gethostname()}: use object_store, or "
                "learner.device=cuda and server.engine.num_gpus=1."
            )

    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> Iterator[Offer]:
        if self._sender is None:
            self._sender = _Sender(self.pair)
        yield self._sender.offer(version, buckets)

    async def fetch(self, version: int, pieces: Sequence[Offer], engine: WeightTarget) -> None:
        try:
            shards = [await asyncio.to_thread(self._received, version, offer) for offer in pieces]
        except (OSError, RuntimeError, ValueError) as error:  # of sockets, of NCCL, and an answer cut short
            raise VersionGoneError(f"Version {version} does not come by NCCL: {error!r}") from error
        await engine.load_weights(version, [bucket for of_rank in shards for bucket in of_rank])

    def _received(self, version: int, offer: Offer) -> list[WeightBucket]:
        with (
            socket.create_connection((offer.host, offer.port), SECONDS) as link,
            link.makefile("rw") as lines,
        ):
            print(offer.key, version, file=lines, flush=True)
            with closing(self.pair(offer.host, int(lines.readline()))) as pair:
                return [
                    WeightBucket(places=places, buffer=pair.receive(size)) for places, size in offer.buckets
                ]


class _Sender(ThreadingTCPServer):
    """Sends the newest version of a rank, in a thread for each replica that connects."""

    daemon_threads = True

    def __init__(self, pair: Any) -> None:
        super().__init__((get_node_ip_address(), 0), _Connection)
        self.pair, self.key = pair, secrets.token_hex()
        self.newest: tuple[int, Sequence[WeightBucket]] = (0, ())
        Thread(target=self.serve_forever, name="weights by NCCL", daemon=True).start()

    def offer(self, version: int, buckets: Iterable[WeightBucket]) -> Offer:
        """Keep a version in place of the one before: the memory of ``buckets`` is used again."""
        kept = [replace(each, buffer=each.buffer.copy()) for each in buckets]
        self.newest = version, kept
        host, port = self.server_address[:2]
        return Offer(str(host), int(port), self.key, [(each.places, each.buffer.nbytes) for each in kept])


class _Connection(StreamRequestHandler):
    server: _Sender
    timeout = SECONDS

    def handle(self) -> None:
        key, _, wanted = self.rfile.readline(200).strip().partition(b" ")
        version, buckets = self.server.newest
        if not hmac.compare_digest(key, self.server.key.encode()) or wanted != b"%d" % version:
            return  # a connection that ends without a port: the version is gone
        host = str(self.server.server_address[0])
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self.wfile.write(b"%d\n" % port)
            with closing(self.server.pair(host, port, listener)) as pair:
                for bucket in buckets:
                    pair.send(bucket.buffer)
