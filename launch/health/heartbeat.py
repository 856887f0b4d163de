"""Heartbeats of trainings: each writes every second what it is doing, and ``launch.status`` reads it.

Ray's head process keeps them in its key-value store: no actor is needed, and those of the run may all hang.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass

from ray.experimental import internal_kv

from actors.ray_tools.placement import NAMESPACE
from actors.timing import HEARTBEAT_SECONDS
from environments.background import in_background

KEY_PREFIX = b"run-"
START_PHRASES = {
    "learner": "waits for the learner's ranks to start",
    "checkpoint": "waits for the learner to load the checkpoint",
    "server": "waits for the policy server to start",
}
"""Activities of a run that starts, by the part that it waits for."""


@dataclass(frozen=True, kw_only=True)
class RunHeartbeat:
    """State of a training at its last heartbeat.

    Args:
        folder: of the run.
        pid, host: of its driver.
        fleets: names of its fleets.
        activity: what its loop is doing, such as "waits for rollouts".
        seconds: for how long it has been doing that.
        idle_seconds: since anything has moved.
        num_updates: policy updates so far.
        progress: seconds since the stages of the loop last came to a result, by the result.
        sent_at: seconds of the clock, to be compared with ``time.time``.
    """

    folder: str
    pid: int
    host: str
    fleets: Sequence[str]
    activity: str
    seconds: float
    idle_seconds: float
    num_updates: int
    progress: dict[str, float]
    sent_at: float


def run_heartbeats() -> list[RunHeartbeat]:
    """The trainings of the cluster that this process is connected to."""
    found = []
    for key in internal_kv._internal_kv_list(KEY_PREFIX, namespace=NAMESPACE):
        text = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        if text is not None:  # else it ended while we looked
            found.append(RunHeartbeat(**json.loads(text)))
    return sorted(found, key=lambda heartbeat: (heartbeat.folder, heartbeat.pid))


class HeartbeatSender:
    """Sends a training's heartbeat every second, from a thread, until ``stop``.

    Args:
        heartbeat: returns the present heartbeat.
    """

    def __init__(self, heartbeat: Callable[[], RunHeartbeat]) -> None:
        self._heartbeat = heartbeat
        self._key = KEY_PREFIX + f"{socket.gethostname()}-{os.getpid()}".encode()
        self._stopped = threading.Event()
        self.last_sent = time.monotonic()
        """Time at which Ray's head process last took a heartbeat."""
        self._thread = in_background(self._beat, "heartbeat")

    def _beat(self) -> None:
        """consumes time · waits for Ray's head process · produces a heartbeat"""
        while not self._stopped.is_set():
            text = json.dumps(asdict(self._heartbeat())).encode()
            internal_kv._internal_kv_put(self._key, text, overwrite=True, namespace=NAMESPACE)
            self.last_sent = time.monotonic()
            self._stopped.wait(HEARTBEAT_SECONDS)
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)

    def stop(self) -> None:
        """Take the heartbeat out, if Ray's head process still answers."""
        self._stopped.set()
        wait([self._thread], 2 * HEARTBEAT_SECONDS)  # where it does not, the run ends for that reason
