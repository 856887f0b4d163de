"""Counts the resources of all processes of a program together, and its files, and ends what it leaves behind.

Used by the sandbox ``local``, for programs of rollouts and servers of worlds: the kernel's own limits are
for one process.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

KILL_SECONDS = 10.0
"""Seconds that processes have to end after they were killed."""
SEARCH_SECONDS = 120.0
"""Seconds to find all of a program's processes: hundreds that are busy leave little time to the search."""
SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_TIMES_AT = slice(11, 15)  # in /proc/PID/stat, after the name: its own, and of children it waited for


@dataclass(frozen=True)
class Usage:
    """The memory, the CPU time and the number of processes, threads counted too."""

    memory_bytes: int
    cpu_seconds: float
    num_threads: int


def usage_of(processes: list[int], most_bytes: int, most_threads: int, deadline: float) -> Usage:
    """Count processes and their descendants, as they are now, and the time of those that they waited for.

    It stops at the deadline, and where there is too much of something, since a program may have much that
    takes long to count. Memory is exact where it may be too much: else it is counted as if nothing were
    shared, which is quick.
    """
    ticks, threads = 0, 0
    resident: dict[int, int] = {}
    opened: dict[int, int] = {}
    mapped: dict[int, int] = {}
    waiting = list(processes)
    while waiting and threads <= most_threads and time.monotonic() < deadline:
        pid = waiting.pop()
        with suppress(OSError, ValueError):  # it has ended
            threads += len(os.listdir(f"/proc/{pid}/task"))
            waiting += children(pid)
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_TIMES_AT]
            ticks += sum(map(int, times))
            resident[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            _find_shared(pid, opened, mapped)
    memory = sum((mapped | opened).values())
    exact = memory + sum(resident.values()) > most_bytes
    for pid in sorted(resident, key=resident.__getitem__, reverse=True):
        if memory > most_bytes or time.monotonic() >= deadline:
            break
        with suppress(OSError, ValueError):
            memory += _own_bytes(pid) if exact else resident[pid]
    return Usage(memory, ticks / _TICKS_PER_SECOND, threads)


def bytes_within(folder: str, most: int) -> int | None:
    """Size of the files and folders below ``folder``; None if there are more than ``most``, or some hide.

    A program can hide files from a count, in folders that are unreadable or nested beyond the longest path.
    """
    size, number = 0, 0
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    number += 1
                    if number > most:
                        return None
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except OSError:
            return None
    return size


def children(pid: int) -> list[int]:
    """The processes that a process has started; it raises OSError if that has ended."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def remove_folder(directory: str) -> None:
    """Remove the folder of a program. It is empty where the program was isolated."""
    try:
        os.rmdir(directory)
    except OSError:
        # Not by shutil, which recurses: a program may nest thousands of folders.
        subprocess.run(["rm", "-rf", "--", directory], check=False, stderr=subprocess.DEVNULL)
        if os.path.exists(directory):
            logger.warning("Could not remove %s, which a program in the sandbox left behind.", directory)


def kill_started(supervisor: int, mark: str) -> None:
    """Kill the supervisor's descendants, orphans too, and processes with ``mark`` in their environment.

    By groups, since one call then ends all members, however quickly they fork. The supervisor is not in any.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    try:
        groups = set(children(supervisor))  # first the program's own, without a look at all processes
    except OSError:  # it has ended
        groups = _started(supervisor, mark.encode())
    while groups and time.monotonic() < deadline:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        groups = _started(supervisor, mark.encode())
    if groups:
        logger.warning("Could not end the process groups %s of a program in the sandbox.", sorted(groups))


def _started(supervisor: int, mark: bytes) -> set[int]:
    """The groups of the processes that a supervisor's program has started and that have not ended."""
    parents, groups, marked, ended = {}, {}, set(), {supervisor}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            pid = int(process.name)
            with suppress(OSError):  # it ended, or, from here on, may not be looked into
                state, parent, group = (process / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                parents[pid], groups[pid] = int(parent), int(group)
                if state in b"ZX":
                    ended.add(pid)
                elif mark in (process / "environ").read_bytes().split(b"\0"):
                    marked.add(pid)
    descendants: set[int] = set()
    generation = {supervisor}
    while generation := {pid for pid, parent in parents.items() if parent in generation}:
        descendants |= generation
    return {groups[pid] for pid in (descendants | marked) - ended}


def _find_shared(pid: int, opened: dict[int, int], mapped: dict[int, int]) -> None:
    """Add the objects of shared memory of a process, each by its number: how many bytes of it are filled.

    These are memfds, segments of System V, and mappings that processes share. Of one that is mapped and not
    open, the kernel tells others no more than how far the mapping reaches.
    """
    with suppress(PermissionError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, _, offset, device, number, *_ = line.split(maxsplit=5)
            if device == _SHARED_DEVICE:
                begin, end = span.split("-")
                reach = int(offset, 16) + int(end, 16) - int(begin, 16)
                mapped[int(number)] = max(mapped.get(int(number), 0), reach)
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                if _device(status.st_dev) == _SHARED_DEVICE:
                    opened[status.st_ino] = status.st_blocks * 512


def _own_bytes(pid: int) -> int:
    """A process's share of the memory that it uses, without what ``_find_shared`` finds."""
    try:
        sizes = _sizes(f"/proc/{pid}/smaps_rollup")
    except PermissionError:  # then all that is not of a file
        return _sizes(f"/proc/{pid}/status").get("RssAnon", 0)
    return sizes.get("Pss", 0) - sizes.get("Pss_Shmem", 0)


def _sizes(path: str) -> dict[str, int]:
    """The lines of a file of /proc that give a size, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}


def _device(number: int) -> str:
    return f"{os.major(number):02x}:{os.minor(number):02x}"


with os.fdopen(os.memfd_create("device")) as _memory:
    _SHARED_DEVICE = _device(os.fstat(_memory.fileno()).st_dev)
    """The device on which the kernel keeps all shared memory that has no name."""


class Supervised:
    """A program under a supervisor, which ends with this process at the latest."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        output: IO[bytes],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        reading, self._owner = os.pipe()
        self._lock = threading.Lock()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", SUPERVISOR, str(reading), *command],
                cwd=folder,
                env=dict(variables),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(reading,),
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def end(self) -> int:
        """End it and all that it has started; return the program's exit code. Several threads may call it."""
        with self._lock:
            if self._owner >= 0:
                os.close(self._owner)
                self._owner = -1
            if self.process.stdin is not None:
                self.process.stdin.close()
            return self.process.wait(KILL_SECONDS)
