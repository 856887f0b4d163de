"""Counts what all processes of a program use together. Used by ``local``, where limits are per process."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """The memory and the number of the processes below another one."""

    memory_bytes: int
    num_processes: int


def usage_below(process: int) -> Usage:
    """Count the descendants of a process, as they are now."""
    memory, number = 0, 0
    waiting = _children(process)
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):  # it has ended
            memory += _memory_bytes(pid)
            number += 1
            waiting += _children(pid)
    return Usage(memory, number)


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def _memory_bytes(pid: int) -> int:
    """Its share of the memory that it uses; where that is not for us to read, all that is not of a file."""
    with suppress(PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * _PAGE_BYTES
