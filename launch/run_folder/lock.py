"""Lock of a run's folder: one process at a time writes there, and all who write see the same folder."""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from actors.ray_tools.job import in_job
from environments import disk
from environments.errors import ConfigError

LOCK = ".lock"


class RunLock:
    """Holds ``directory``, which is made if there is none, until the end of its ``with`` or of the process.

    Raises:
        ConfigError: another process holds it, or nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / LOCK
        with writing_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
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
        """Text of the file: processes that read the same see the same folder."""
        with writing_to(directory):
            self._file.truncate(0)
            self._file.write(self.text)
            self._file.flush()
            os.fsync(self._file.fileno())  # for those who read it on other nodes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def writing_to(directory: Path) -> AbstractContextManager[None]:
    """Raises ``ConfigError`` in place of an ``OSError``: nothing can be written to the run's folder."""
    remedy = "name a folder that can be made, on a disk with room"
    return disk.writing_to(f"run.directory={directory}", remedy)


def run_directory(setting: str) -> Path:
    """The folder that ``run.directory`` means.

    Raises:
        ConfigError: it is not named, or in a job's copy of the working directory, which ends with the job.
    """
    if not setting:
        raise ConfigError("run.directory is empty: name a folder, such as run.directory=runs/my-run.")
    directory = Path(setting).expanduser()
    if in_job() and not directory.is_absolute():
        raise ConfigError(
            f"run.directory={setting} is inside this job's copy of the working directory, which Ray deletes "
            "some time after the job: name an absolute path on a disk that the nodes share."
        )
    return directory.absolute()
