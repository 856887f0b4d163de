"""A learner's rank as a Ray actor. Importing this is light: verl and torch are imported where a rank opens.

So the program that starts the ranks, which computes nothing, has none of it: 4 s of CPU time and 0.4 GB.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from environments.errors import ConfigError, LearnerError

if TYPE_CHECKING:
    from policies.learning.verl.worker import VerlWorker


class RankWorker(ABC):
    """Loads its model in a call. Ray returns an exception as it was raised from a call, but not from a
    constructor.

    Args:
        shared_file: path and text of a file in the run's folder; ``None`` if there is no folder to share.
        arguments: of the model.
    """

    def __init__(self, shared_file: tuple[str, str] | None, **arguments: Any) -> None:
        self._shared_file = shared_file
        self._arguments = arguments

    def listen(self) -> tuple[str, int]:
        """Open the store in which all ranks meet, and return its address. The first rank's first call."""
        from torch.distributed import TCPStore

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
        self._model = self._load(**self._arguments)

    @abstractmethod
    def _load(self, **arguments: Any) -> VerlWorker:
        """The model. This imports verl."""

    def work(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the model, as all ranks do at the same time.

        Raises:
            LearnerError: the GPU's memory is full.
        """
        from torch import OutOfMemoryError

        try:
            return methodcaller(method, *args)(self._model)
        except OutOfMemoryError as error:
            most = self._arguments["learner"].micro_batch_tokens
            raise LearnerError(
                f"The GPU of a learner rank on {socket.gethostname()} has no memory left ({error}). Lower "
                f"learner.micro_batch_tokens={most}, or raise learner.num_workers, which divide the model."
            ) from error


class LearnerWorker(RankWorker):
    """A rank of the policy."""

    def _load(self, **arguments: Any) -> VerlWorker:
        from actors.learning.publishing_learner import PublishingLearner

        return PublishingLearner(**arguments)


class CriticWorker(RankWorker):
    """A rank of the critic."""

    def _load(self, **arguments: Any) -> VerlWorker:
        from policies.learning.verl.critic import VerlCritic

        return VerlCritic(**arguments)


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
