"""The learner's ranks as Ray actors. Importing this module imports verl and torch."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import TCPStore

from actors.weights.store import PublishedWeights
from actors.weights.transport import WeightTransport
from environments.errors import ConfigError
from policies.engines.weights import WeightBucket
from policies.learning.verl import weights as verl_weights
from policies.learning.verl.critic import VerlCritic
from policies.learning.verl.learner import VerlLearner
from policies.learning.verl.worker import on_all_ranks


class OpenedLater:
    """Loads its model in a call. Ray returns an exception as it was raised from a call, but not from a
    constructor.

    Args:
        shared_file: path and text of a file in the run's folder; ``None`` if there is no folder to share.
        arguments: of the constructor of the next class.
    """

    def __init__(self, shared_file: tuple[str, str] | None, **arguments: Any) -> None:
        self._shared_file = shared_file
        self._arguments = arguments

    def listen(self) -> tuple[str, int]:
        """Open the store in which all ranks meet, and return its address. The first rank's first call."""
        host = ray.util.get_node_ip_address()
        self._meeting_store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._meeting_store.port

    def open(self, meeting: tuple[str, int]) -> None:
        """Meet the other ranks and load the model.

        Args:
            meeting: the address that ``listen`` of the first rank has returned.

        Raises:
            ConfigError: the run's folder on this node is not the one on the driver's node.
        """
        if self._shared_file is not None:
            check_shared(*self._shared_file)
        host, port = meeting
        # To torch, the store is one that was opened before the ranks: none of them opens another.
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        super().__init__(**self._arguments)


class LearnerWorker(OpenedLater, VerlLearner):
    """``VerlLearner`` that publishes its weights.

    Args:
        store: the ``WeightStore`` that knows the transport.
    """

    def __init__(self, store: ray.actor.ActorHandle, **arguments: Any) -> None:
        self._store = store
        super().__init__(**arguments)

    def open(self, meeting: tuple[str, int]) -> None:
        """As above. Raises ``ConfigError`` also if the weights' transport cannot work on this node."""
        self._transport: WeightTransport = ray.get(self._store.transport.remote())
        self._transport.open()
        super().open(meeting)

    @on_all_ranks
    def publish_weights(self, version: int) -> tuple[Any, dict[str, Any]]:
        """Write the present weights, adapters merged; return their location, and where the learning rate's
        schedule is.
        """
        weights = self.weights()
        try:
            return self._transport.publish(version, weights, self.rank), self.schedule()
        finally:  # all ranks gather each tensor together: if one stopped early, the others would hang
            for _ in weights:
                pass

    @on_all_ranks
    def take_over(self, published: PublishedWeights, schedule: dict[str, Any]) -> None:
        """Go on from published weights, and with the learning rate that came after them.

        Raises:
            WeightTransportError: they cannot be read.
        """
        fetched = FetchedWeights()
        asyncio.run(self._transport.fetch(published.version, published.location, fetched))
        verl_weights.fill(self._tensors(), fetched.tensors.__getitem__)
        self.set_schedule(schedule)


class FetchedWeights:
    """Takes whole tensors from a transport, by name. (A rank with a coroutine would be an actor that runs
    several calls at a time.)
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self.tensors = {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}


class CriticWorker(OpenedLater, VerlCritic):
    """``VerlCritic`` as a Ray actor."""


def check_shared(path: str, text: str) -> None:
    """Raise ``ConfigError`` unless the file ``path`` holds ``text`` on this node, too."""
    try:
        seen = Path(path).read_text(encoding="utf-8")
    except OSError:
        seen = ""
    if seen != text:
        raise ConfigError(
            f"run.directory={Path(path).parent} is another folder on {socket.gethostname()}, where a rank of "
            "the learner is, than on the driver's node: put it on a disk that all nodes share."
        )
