"""The program of a process that imports what the pairs of a rollout actor need, and forks one for each.

Nothing runs in it, so that a fork copies no lock that somebody holds: Ray, whose threads would, is not here.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from actors.rollouts.pair_process import PID, play

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    """Fork a process for each descriptor that comes by the socket of ``sys.argv``, until that is closed."""
    control = socket.socket(fileno=int(sys.argv[2]))
    for name in sys.argv[3:]:
        with suppress(ImportError):  # a class that was sent by value: its module may not be here
            importlib.import_module(name)
    if (num_threads := threading.active_count()) > 1:
        sys.exit(
            f"Importing {' and '.join(sys.argv[3:])} has started {num_threads - 1} thread(s), which a forked "
            "process would lack: set fleet.pairs_per_actor=1, or start them in the environment's __init__."
        )
    gc.freeze()  # so that no collection writes to the pages that all share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        zygote = os.getpid()
        if pid := os.fork():
            os.close(descriptors[0])
            control.sendall(PID.pack(pid))
        else:
            control.close()
            _begin(zygote)
            play(Connection(descriptors[0]))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _begin(zygote: int) -> None:
    """Let a forked process end with the zygote, and draw other numbers than its siblings."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != zygote:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:  # Python's own generator does it by itself
        sys.modules["numpy"].random.seed()
