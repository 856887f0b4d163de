"""Transport of weights from the learner's ranks to the engines: the protocol, its default, and the choice by
settings."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from environments.errors import ConfigError, PartLostError, WeightsError
from environments.named_module import load_class
from policies.engines.weights import WeightBucket

if TYPE_CHECKING:
    import ray

TRANSPORTS = {
    "deltas": "actors.weights.deltas:DeltaTransport",
    "files": "actors.weights.files:FileTransport",
    "nccl": "actors.weights.nccl:NcclTransport",
    "object_store": "actors.weights.transport:ObjectStoreTransport",
}


class WeightTransportError(WeightsError):
    """Published weights cannot be read."""


class VersionGoneError(WeightTransportError):
    """The weights of a version are not there any more, or, on a slow disk, not there yet."""


class VersionLostError(VersionGoneError, PartLostError):
    """The only node that had the weights of a version is lost. A run goes on from its checkpoint."""


class WeightTarget(Protocol):
    """Takes weights over: an engine, or a rank of a learner that is rebuilt."""

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        """Go on with these weights, whose version is ``version``."""


class WeightTransport(ABC):
    """Carries the weights of a version from the learner's ranks to the engines.

    The driver makes one. The weight store, the learner's ranks and the replicas of the policy server each get
    a copy of it (pickled). What carries a version are its pieces, which only the transport itself reads: its
    weights, in some parts, or what says where they are. Each is an object of Ray's that is the driver's: it
    lies on the node of the rank that has written it, outlives that rank, and is copied once to each node on
    which it is read.

    Args:
        folder: a folder in the run's folder, of this transport alone. It need not exist.
        options: what ``server.weights`` says beside ``transport``.
    """

    @abstractmethod
    def __init__(self, folder: str, **options: Any) -> None: ...

    @classmethod  # noqa: B027
    def check_dtype(cls, dtype: str | None) -> None:
        """Raise ``ConfigError`` if weights for engines of this ``half_dtype`` are not for this transport."""

    @classmethod  # noqa: B027
    def check_use(cls, shares_devices: bool, pins_versions: bool) -> None:
        """Raise ``ConfigError`` if this transport does not serve such a run.

        Args:
            shares_devices: engines are on the learner's devices.
            pins_versions: evaluations on engines of their own go on with a version while newer ones are
                published.
        """

    def open(self) -> None:  # noqa: B027
        """Called once in every rank and every replica, before a model is loaded.

        Raises:
            ConfigError: the transport cannot work on this node.
        """

    @abstractmethod
    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> Iterable[Any]:
        """Write a rank's shards of the weights; return or yield the pieces. Called on every rank. Those of
        rank 0 come first in the version.

        Args:
            buckets: the shards, which ``load_weights`` is to get under the same names. Their memory is used
                again for the next version.
            rank: 0 and above.
        """

    async def keep(self, version: int, pieces: Sequence[ray.ObjectRef]) -> Sequence[ray.ObjectRef]:
        """Make the weights stay where this store needs them; return their pieces from now on.

        Called in the process of a weight store with the pieces that ``publish`` has made, or, where an
        evaluation pins a version in a store of its own, with those in the training's store. Of this store's
        earlier versions none is needed any more, but for replicas that are still reading one.
        """
        return pieces

    @abstractmethod
    async def fetch(self, version: int, pieces: Sequence[Any], engine: WeightTarget) -> None:
        """Load the weights into ``engine``. Called in every replica, and in the ranks of a learner that is
        rebuilt.

        Raises:
            VersionGoneError: they are not there. The caller tries again with the newest version.
            WeightTransportError: they are damaged.
        """

    def close(self) -> None:  # noqa: B027
        """Delete what is left. Called in the driver when the run ends."""


class ObjectStoreTransport(WeightTransport):
    """Carries weights through Ray's object store: each bucket of a rank's shards is a piece."""

    def __init__(self, folder: str = "") -> None:
        pass

    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> Iterable[WeightBucket]:
        return buckets

    async def fetch(self, version: int, pieces: Sequence[WeightBucket], engine: WeightTarget) -> None:
        await engine.load_weights(version, pieces)


def transport_class(settings: Mapping[str, Any]) -> type[WeightTransport]:
    """The class of the transport that ``server.weights`` names.

    Raises:
        ConfigError: there is no such class, or it does not take the other settings as arguments.
    """
    name, options = _split(settings)
    found = load_class("server.weights.transport", name, TRANSPORTS, WeightTransport)
    try:
        inspect.signature(found).bind("folder", **options)
    except TypeError as error:
        raise ConfigError(
            f"server.weights.transport={name} does not take server.weights={options}: {error}. Correct or "
            "leave out what stands beside transport."
        ) from error
    return found


def make_transport(settings: Mapping[str, Any], run_folder: str, purpose: str) -> WeightTransport:
    """The transport that ``server.weights`` names.

    Args:
        purpose: "training" or "evaluation". Each has a folder of its own.

    Raises:
        ConfigError: as ``transport_class`` does, or the transport cannot work here.
    """
    folder = os.path.join(os.path.abspath(run_folder), f"weights_{purpose}")
    return transport_class(settings)(folder, **_split(settings)[1])


def _split(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the transport."""
    options = dict(settings)
    return str(options.pop("transport", "object_store")), options
