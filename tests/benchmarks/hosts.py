"""Hosts of one machine with a Ray node each, for ``three_hosts``.

A host is a network namespace with a cable to a switch, which is another namespace: the network of the machine
is not touched. A host has an address and a /tmp/ray of its own; disk and /dev/shm are shared.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import repository

from actors.ray_tools.connect import RAYLET_ENVIRONMENT

HERE = Path(__file__).resolve().parent
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
RAY_FOLDER = Path("/tmp/ray")
PORT = 6379
SWITCH = "switch"
HOST = "TROUPE_HOST"
"""Environment variable of the processes of a host: its name."""
PRINT_NODE = "import ray; ray.init(log_to_driver=False); print(ray.get_runtime_context().get_node_id())"
START_SECONDS, END_SECONDS = 60.0, 10.0


class Network:
    """The hosts; the first one is the head of the cluster. Leaving the context ends all that runs on them.

    Args:
        folder: for what they write to /tmp/ray.

    Raises:
        SystemExit: this machine does not let this process make network namespaces.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._prefix = folder, f"troupe-{os.getpid()}-"
        self._names: list[str] = []
        self._num_hosts = 0

    def __enter__(self) -> Network:
        if os.geteuid() or shutil.which("ip") is None:
            sys.exit("Hosts are network namespaces: this needs root, and the command ip (package iproute2).")
        try:
            self._add_namespace(SWITCH)
            self._ip("-n", self._full(SWITCH), "link", "add", "bridge", "up", "type", "bridge")
        except subprocess.CalledProcessError as error:
            self._end_all()
            sys.exit(f"This machine does not allow network namespaces with a bridge: {error.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        patience = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave hosts behind
        self._end_all()
        signal.signal(signal.SIGINT, patience)

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.address_of(1)}:{PORT}"

    @staticmethod
    def address_of(number: int) -> str:
        """The address of a host; they are numbered from 1 as they come."""
        return f"10.77.0.{number}"

    def add(self, name: str, *arguments: str) -> str:
        """Start a host and a Ray node on it; return its address.

        Args:
            arguments: for ``ray start``.
        """
        self._num_hosts += 1
        own = self.address_of(self._num_hosts)
        self._add_namespace(name)
        host, switch = self._full(name), self._full(SWITCH)
        self._ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", switch)
        self._ip("-n", host, "address", "add", f"{own}/24", "dev", "eth0")
        self._ip("-n", host, "link", "set", "eth0", "up")
        self._ip("-n", switch, "link", "set", name, "master", "bridge", "up")
        place = [f"--address={self.address}"]
        if self._num_hosts == 1:
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        start = [*RAY, "start", *place, f"--node-ip-address={own}", "--disable-usage-stats", *arguments]
        self._run(name, start)
        return own

    def on(self, name: str) -> list[str]:
        """The words that run the command that follows them on a host."""
        # ip gives the command a view of the mounts that is its own.
        mount = f'mount --bind "$0" {RAY_FOLDER} && exec "$@"'
        return ["ip", "netns", "exec", self._full(name), "sh", "-c", mount, str(self._ray_folder(name))]

    def environment(self, name: str) -> dict[str, str]:
        """Variables of the processes of a host, beside those of this program."""
        path = os.pathsep.join(map(str, [repository.ROOT, HERE]))
        own = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": self.address, "PYTHONPATH": path, HOST: name}
        return RAYLET_ENVIRONMENT | own

    def unplug(self, name: str) -> None:
        """Cut a host off: its cable is pulled out."""
        self._ip("-n", self._full(SWITCH), "link", "set", name, "down")

    def drain(self, name: str, seconds: int) -> None:
        """Have Ray know that a host leaves in so many ``seconds``."""
        node = self._run(name, [sys.executable, "-c", PRINT_NODE]).split()[-1]
        command = [*RAY, "drain-node", f"--address={self.address}", f"--node-id={node}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=wanted back"]
        self._run(name, [*command, f"--deadline-remaining-seconds={seconds}"])

    def end(self, name: str) -> None:
        """Switch a host off, with all that runs on it."""
        deadline = time.monotonic() + END_SECONDS
        while (pids := self._ip("netns", "pids", self._full(name)).split()) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        self._ip("netns", "delete", self._full(name))
        self._names.remove(name)
        shutil.rmtree(self._ray_folder(name), ignore_errors=True)

    def _end_all(self) -> None:
        for name in reversed(self._names.copy()):
            self.end(name)

    def _add_namespace(self, name: str) -> None:
        self._ip("netns", "add", self._full(name))
        self._names.append(name)
        self._ray_folder(name).mkdir(parents=True)
        RAY_FOLDER.mkdir(exist_ok=True)
        self._ip("-n", self._full(name), "link", "set", "lo", "up")

    def _full(self, name: str) -> str:
        return self._prefix + name

    def _ray_folder(self, name: str) -> Path:
        return self._folder / f"ray-{name}"

    def _run(self, name: str, command: Sequence[str]) -> str:
        environment = os.environ | self.environment(name)
        if "start" in command:
            del environment["RAY_ADDRESS"]  # `ray start --head` would not start another cluster
        # Daemons of Ray keep what they are given for their output: not a pipe that would be waited for.
        log = self._folder / f"{name}.txt"
        with log.open("a+") as output:
            begin = output.tell()
            options: dict[str, Any] = {"cwd": repository.ROOT, "env": environment, "timeout": START_SECONDS}
            done = subprocess.run([*self.on(name), *command], stdout=output, stderr=output, **options)
            output.seek(begin)
            said = output.read()
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed on host {name}: {said[-2000:]}")
        return said

    @staticmethod
    def _ip(*arguments: str) -> str:
        return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
