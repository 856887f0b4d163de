"""Where the Ray cluster is that this process would join."""

from __future__ import annotations

import os
import socket

import ray
from ray._private.utils import read_ray_address

from environments.errors import ConfigError


def check_answers() -> None:
    """Find a cluster that is gone, as after a restart of the machine: Ray would try in silence for minutes.

    Raises:
        ConfigError: nothing answers where ``RAY_ADDRESS`` or the note of ``ray start`` points to.
    """
    address = _address()
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in host:  # none, or a form that only Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise unreachable(f"{address}: {error}") from error


def joins_cluster() -> bool:
    """Whether this process is connected to a cluster, or would join one instead of starting its own."""
    return ray.is_initialized() or _address() not in ("", "local")  # which asks Ray for a new one


def _address() -> str:
    return os.environ.get("RAY_ADDRESS") or read_ray_address() or ""


def unreachable(reason: object) -> ConfigError:
    """The error for a cluster that does not answer."""
    return ConfigError(
        f"The Ray cluster that this process was pointed to does not answer ({reason}): start it with "
        "`ray start --head`, or unset RAY_ADDRESS and run `ray stop` to have one started here."
    )
