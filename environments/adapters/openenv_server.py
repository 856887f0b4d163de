"""Servers of OpenEnv: their addresses, and those that this process starts by a command.

A server that was started ends with this process, however that ends, with all that it has started itself. A
container's engine starts its processes for it: they can end with its standard input, open until then.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, NamedTuple

from environments.adapters import foreign
from environments.errors import ConfigError, EnvironmentFailure
from environments.sandbox.process_tree import Supervised

START_SECONDS = 300.0
"""Seconds within which a server that was started has to answer."""
_ADDRESS = re.compile(r"(?:http|ws)(s?://\S+)")
_PORT = re.compile(r"\bPORT\b")
_LOG_BYTES = 2000


class _StartedServer(NamedTuple):
    program: Supervised
    address: str


_servers: dict[tuple[int, str], _StartedServer] = {}
"""Keys are the process that started them, which a fork of it is not, and their commands."""
_lock = threading.Lock()


def address_of(server: str) -> str:
    """Return the address of a server by HTTP; a command starts one, once in a process.

    Raises:
        ConfigError: ``server`` is neither an address nor a command with the word PORT.
        EnvironmentFailure: the command has ended, or does not serve in ``START_SECONDS``.
    """
    if match := _ADDRESS.fullmatch(server):
        return f"http{match[1]}".rstrip("/")
    key = (os.getpid(), server)
    with _lock:
        if key not in _servers or _servers[key].program.process.poll() is not None:
            _servers[key] = _start(server)
        return _servers[key].address


def is_started(server: str) -> bool:
    """Return whether ``server`` is a command: its address is one of this machine, and no proxy's."""
    return _ADDRESS.fullmatch(server) is None


def end_server(server: str) -> None:
    """End the server that this process has started by the command ``server``, if it has."""
    with _lock:
        started = _servers.pop((os.getpid(), server), None)
    if started is not None:
        started.program.end()


def _start(command: str) -> _StartedServer:
    if not _PORT.search(command):
        raise ConfigError(
            f"The OpenEnv server {command!r} is neither an address, such as http://host:8000, nor a command "
            "with the word PORT, such as uvicorn my_world.app:app --port PORT."
        )
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    words = [_PORT.sub(str(port), word) for word in shlex.split(command)]
    with tempfile.TemporaryFile() as log:
        program = Supervised(words, os.getcwd(), os.environ, log, stdin=subprocess.PIPE)
        started = _StartedServer(program, f"http://127.0.0.1:{port}")
        try:
            _wait_until_healthy(started, command, log)
        except BaseException:  # also the time limit of a rollout
            started.program.end()
            raise
    return started


def _wait_until_healthy(started: _StartedServer, command: str, log: IO[bytes]) -> None:
    httpx = foreign("httpx", "httpx")
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(timeout=10, follow_redirects=True, trust_env=False) as client:
        while started.program.process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                client.get(f"{started.address}/health").raise_for_status()
                return
            time.sleep(0.1)
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
    raise EnvironmentFailure(
        f"The command {command!r} has ended, or has not answered {started.address}/health within "
        f"{START_SECONDS:g} s. Check that it runs by itself on this machine, in {os.getcwd()}. Its "
        f"output ends with:\n{log.read().decode(errors='replace')}"
    )
