"""The server at which programs elsewhere fetch the tasks of a training, as the process that trains sees it.

It is a process of its own (``actors.gateway.sessions``), so that its address, the calls on their way and the
names of sessions outlast a driver that is killed::

    driver  -->  POST /driver, a connection that is held as long as it lives  -->  the server's process
    killed: the connection ends; sessions and their calls wait
    driver of the resumed run, with the same port and the key that the first has left in a file  -->  the same
    its rollouts offer the tasks again  -->  each goes to the program that was at it
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import httpx
from ray.util import get_node_ip_address

from actors.gateway.remote_program import RemoteProgram
from actors.serving.keys import KEYS_VARIABLE, read_keys
from environments.errors import ConfigError

SESSIONS_PORT = 8100
CLAIM_SECONDS = 120.0
"""Time that a task waits for a program."""
SILENT_SECONDS = 300.0
"""Time from one call of a program to the next, or to its reward."""
ATTACH_SECONDS = 10.0
"""Time that the server gets to answer its driver."""


class SessionServer:
    """Hands the tasks of rollouts to programs that ask for them, in a process of its own.

    ``AgentTrainer(rollout=SessionServer().rollout, ...)`` trains what such programs do. They send a key of
    ``TROUPE_API_KEYS``, as clients of the policy server do; one who has it can play, and judge, any task.

    It ends with this process, unless that is killed: then it waits for another one at the same port.

    Attributes:
        url: its address, at this node.
        rollout: the rollout function.

    Args:
        port: 0 takes any that is free.
        host: address to listen at, which rollouts and programs reach; that of this node by default.
        claim_seconds: a task fails, and is tried again as often as failed rollouts are, where no program has
            asked for one for this time.
        late_rewards: folder of the rewards that come after their rollouts; it is made when one is awaited.
        silent_seconds: so does a task whose program has made no call for this time after an earlier one, or
            since another actor has gone on with it, be it of a resumed run; one that makes none at all is
            waited for until the rollout reaches its time limit, and fails then.

    Raises:
        ConfigError: there is no key, the port cannot be listened on, or its key cannot be left in a file.
    """

    def __init__(
        self,
        port: int = SESSIONS_PORT,
        host: str | None = None,
        claim_seconds: float = CLAIM_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        late_rewards: str | Path = "late_rewards",
    ) -> None:
        keys = read_keys(None)
        if not keys:
            raise ConfigError(
                f"Whoever reaches the session server could play and judge the tasks: set {KEYS_VARIABLE}="
                "name:key, with a key from `openssl rand -hex 24`, here and for the programs."
            )
        host, key = host or get_node_ip_address(), secrets.token_urlsafe(24)
        given = {
            "key": key,
            "keys": {name: digest.hex() for name, digest in keys.digests.items()},
            "claim_seconds": claim_seconds,
            "silent_seconds": silent_seconds,
            "late_rewards": str(Path(late_rewards).resolve()),
        }
        try:
            listening = socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            self._key = _kept_key(_key_file(host, port))
            self._driver = HTTPConnection(host, port, timeout=ATTACH_SECONDS)
            if not self._key or not self._drives(given):
                raise ConfigError(
                    f"Programs elsewhere cannot fetch their tasks at port {port} of {host} ({error}): choose "
                    f"another one, such as {min(port + 1, 65535)}, or end the program that has it. That of a "
                    "killed run has it for some minutes, and serves a run that the same user starts there."
                ) from error
        else:
            self._key, port = key, listening.getsockname()[1]
            self._driver = HTTPConnection(host, port, timeout=ATTACH_SECONDS)
            self._send(given)  # before another one finds the key. It is answered when the process has started
            _leave(key, file := _key_file(host, port))
            start_process(listening, file)
        self.url = f"http://{host}:{port}"
        self.rollout = RemoteProgram(self.url, key, silent_seconds)
        atexit.register(self.close)

    def close(self) -> None:
        """Listen no more; programs that wait for a task get status 410. The port is free at the return."""
        atexit.unregister(self.close)
        with suppress(httpx.HTTPError, OSError):  # it has been ended
            httpx.delete(
                f"{self.url}/driver", headers=self._headers(), timeout=ATTACH_SECONDS, trust_env=False
            )
            while self._driver.sock and self._driver.sock.recv(1024):  # it ends after the port
                pass
        self._driver.close()

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"}

    def _send(self, given: dict[str, object]) -> None:
        self._driver.request("POST", "/driver", json.dumps(given), self._headers())

    def _drives(self, given: dict[str, object]) -> bool:
        """Return whether a server there waits for a driver, which is this process from now on."""
        with suppress(HTTPException, OSError):
            self._send(given)
            return self._driver.getresponse().status == 200
        return False


def start_process(listening: socket.socket, key_file: Path) -> None:
    """Start a server at a listening socket, which goes over to it."""
    descriptor = listening.fileno()
    subprocess.Popen(
        [sys.executable, "-P", "-m", "actors.gateway.sessions", str(descriptor), str(key_file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor the end of the driver's group reaches it
    )
    listening.close()


def _key_file(host: str, port: int) -> Path:
    """The file in which the next driver of a server, of the same user on the same machine, finds its key."""
    return Path(tempfile.gettempdir(), f"troupe-sessions-{os.getuid()}-{host}-{port}")


def _leave(key: str, file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as left:
            left.write(key)
    except OSError as error:
        raise ConfigError(
            f"The session server cannot leave its key in {file} ({error}), where a resumed run seeks it: set "
            "TMPDIR to a folder of your own, the same for both."
        ) from error


def _kept_key(file: Path) -> str:
    """The key in a file of this user; empty where there is none."""
    with suppress(OSError):
        if file.lstat().st_uid == os.getuid():
            return file.read_text()
    return ""
