"""Counts the resources of all processes of a program together, and its files.

Used by ``local``: the kernel's own limits are for one process or one file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_TIMES_AT = slice(11, 15)  # in /proc/PID/stat, after the name: its own, and of children it waited for


@dataclass(frozen=True)
class Usage:
    """The memory, the CPU time and the number of the processes below another one."""

    memory_bytes: int
    cpu_seconds: float
    num_processes: int


def usage_below(process: int) -> Usage:
    """Count the descendants of a process, as they are now, and the time of those that they waited for."""
    memory, ticks, number = 0, 0, 0
    waiting = children(process)
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):  # it has ended
            ticks += _ticks(pid)
            memory += _memory_bytes(pid)
            number += 1
            waiting += children(pid)
    return Usage(memory, ticks / _TICKS_PER_SECOND, number)


@dataclass(frozen=True)
class FileUsage:
    """The size and the number of the files and folders in a folder."""

    num_bytes: int
    num_files: int


def files_within(folder: str, most: int) -> FileUsage | None:
    """Count the files and folders below ``folder``; None if they are more than ``most`` or cannot be counted.

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
    return FileUsage(size, number)


def children(pid: int) -> list[int]:
    """The processes that a process has started; it raises OSError if that has ended."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def _ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_TIMES_AT]))


def _memory_bytes(pid: int) -> int:
    """Its share of the memory that it uses; where that is not for us to read, all that is not of a file."""
    with suppress(PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * _PAGE_BYTES
