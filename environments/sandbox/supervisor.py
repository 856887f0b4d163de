"""Supervisor of a program: a process that ends the program, with all that it has started.

It does so when the program has ended, and when the process that has started it closes its end of a pipe: also
by its death, however that comes. Orphans become children of the supervisor, so none gets away.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def supervise(owner: int, command: list[str]) -> int:
    """Run ``command`` until it ends, or the pipe of which ``owner`` is the reading end has no writer.

    Returns:
        The program's exit code, negative for a signal.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(command, start_new_session=True)
    ended = os.pidfd_open(program.pid)
    select.select([owner, ended], [], [])
    status = program.poll()
    while kill_descendants(os.getpid()):
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return -signal.SIGKILL if status is None else status


def kill_descendants(process: int) -> int:
    """Kill all processes below one; return how many there were."""
    number, waiting = 0, [process]
    while waiting:
        with suppress(OSError):  # it has ended
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                below = [int(child) for child in (task / "children").read_text().split()]
                waiting += below
                number += len(below)
                for child in below:
                    os.kill(child, signal.SIGKILL)
    return number


if __name__ == "__main__":
    end = supervise(int(sys.argv[1]), sys.argv[2:])
    if end < 0:  # so that its own end is the program's
        with suppress(OSError, ValueError):
            signal.signal(-end, signal.SIG_DFL)
        os.kill(os.getpid(), -end)
    sys.exit(end)
