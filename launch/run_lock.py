"""One process at a time writes into a run's folder, and everybody who writes there sees the same folder."""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from pathlib import Path

from environments.errors import ConfigError

LOCK = ".lock"


class RunLock:
    """Holds ``directory``, which is made if there is none, until ``release`` or the end of the process.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / LOCK
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self.path.read_text(encoding="utf-8").partition(" (")[0]
            self._file.close()
            raise ConfigError(
                f"run.directory={directory} is in use by {holder}: stop that run, or name another directory."
            ) from None
        self.text = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex})"
        """What the file holds: whoever reads the same sees the same folder."""
        self._file.truncate(0)
        self._file.write(self.text)
        self._file.flush()
        os.fsync(self._file.fileno())  # for those who read it on other nodes

    def release(self) -> None:
        """Let go of the folder."""
        self._file.close()
