"""A Ray cluster of its own, as ``ray start --head`` makes it, for the programs of a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.ray_tools.connect import RAYLET_ENVIRONMENT

ROOT = Path(__file__).parents[1]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORTS = (
    "port",
    "dashboard-port",
    "ray-client-server-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
"""Other clusters of this machine may have the usual ones."""
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Variable with the seconds, else 30, that a head gives to what still runs on it when it is to end."""
STARTS = 3


@contextmanager
def head_node(num_cpus: int, dashboard: bool = False, **variables: str) -> Iterator[dict[str, str]]:
    """A head node; the environment of a program that joins it, or submits jobs if there is a dashboard.

    Args:
        variables: of the environment, beside those of this process that are not Ray's.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ports = {name: _free_port() for name in PORTS}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path is too long for its sockets
        environment = own | {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder, DRAIN: "0"} | variables
        options = [f"--num-cpus={num_cpus}", f"--temp-dir={folder}/ray", f"--include-dashboard={dashboard}"]
        log = Path(folder) / "head.log"
        options += [f"--{name}={port}" for name, port in ports.items()]
        head = _started([*RAY, "start", "--head", "--block", *options], environment | RAYLET_ENVIRONMENT, log)
        try:
            yield environment | {
                "RAY_ADDRESS": f"127.0.0.1:{ports['port']}",
                "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports['dashboard-port']}",
            }
            assert head.poll() is None, log.read_text()
        finally:
            sys.stdout.write(log.read_text())  # pytest shows it for a test that fails
            head.send_signal(signal.SIGTERM)
            head.wait(timeout=180)


def _started(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The head node, once it is up. Ray allows a start half a minute, whatever else keeps the machine busy:
    one that has taken longer is tried again.
    """
    for _ in range(STARTS):
        with log.open("w") as output:
            head = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        while head.poll() is None:
            if "Ray runtime started" in log.read_text():
                return head
            time.sleep(0.2)
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        if "timed out during startup" not in log.read_text():
            break
    raise AssertionError(log.read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
