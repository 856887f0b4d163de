"""The processes of a run under fault injection, from its first one down."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from actors.timing import PROCESSES_END_SECONDS
from environments.errors import ConfigError
from launch.health.members import Member, is_alive, members
from launch.reporting.audit import Finding
from launch.run_folder.lock import LOCK

RUN_POLL_SECONDS = 1.0


class ProcessTree:
    """The process below which a run lives, and all that have descended from it: none is forgotten.

    Raises:
        ConfigError: there is no such process.
    """

    def __init__(self, below: int) -> None:
        members(below)  # its error names the remedy
        self.below = below
        self._root = psutil.Process(below)
        self._seen = {self._root}

    def is_alive(self) -> bool:
        """Return whether the first of them lives. Its descendants are noted."""
        with suppress(psutil.NoSuchProcess):
            self._seen.update(self._root.children(recursive=True))
        return is_alive(self._root)

    def wait_for_end(self) -> None:
        """Return when the first of them has ended, or with Ctrl-C."""
        with suppress(KeyboardInterrupt):
            while self.is_alive():
                time.sleep(RUN_POLL_SECONDS)

    def present(self) -> list[Member]:
        """Living processes with a role; none if the first of them has just ended."""
        with suppress(ConfigError):
            return members(self.below)
        return []

    def folder(self) -> Path:
        """The run's folder: the one whose lock one of these processes holds.

        Raises:
            ConfigError: none of them holds one.
        """
        self.is_alive()  # it notes those that have come since
        for process in self._seen:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                for file in process.open_files():
                    if Path(file.path).name == LOCK:
                        return Path(file.path).parent
        raise ConfigError(
            f"No process below {self.below} holds a run's folder: name that folder with --run, or wait."
        )

    def left_over(self, seconds: float = PROCESSES_END_SECONDS) -> Finding:
        """Check that all of them end within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := [each for each in self._seen if is_alive(each)]) and time.monotonic() < deadline:
            time.sleep(RUN_POLL_SECONDS)
        if not left:
            return Finding(True, f"of {len(self._seen)} processes none is left")
        return Finding(False, "left: " + ", ".join(f"{each.pid} ({each.name()})" for each in left))
