"""The program of a process that imports what the pairs of a rollout actor need, and forks one for each.

Nothing runs in it, so that a fork copies no lock that somebody holds: Ray, whose threads would, is not here.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
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
    error = _import(sys.argv[3:])
    control.sendall(json.dumps(error).encode() + b"\n")
    if error:
        return
    gc.freeze()  # so that no collection writes to the pages that all share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    zygote = os.getpid()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            _end_session()
            return
        os.set_inheritable(descriptors[0], False)  # a program of the environment holds no end of the pipe
        try:
            pid = os.fork()
        except OSError as failure:
            pid = -(failure.errno or 1)
        if pid:
            os.close(descriptors[0])
            control.sendall(PID.pack(pid))
        else:
            control.close()
            _begin(zygote)
            play(Connection(descriptors[0]))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _import(modules: list[str]) -> str:
    """Import what the pairs need; return why they cannot be forked, if they cannot."""
    for name in modules:
        try:
            with suppress(ImportError):  # a class that was sent by value: its module may not be here
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a user's module, which may raise anything
            return f"importing {name} raised {type(error).__name__}: {error}"
        if (num_threads := threading.active_count()) > 1:
            return (
                f"importing {name} has started {num_threads - 1} thread(s), which they would lack. Set "
                "fleet.pairs_per_actor=1, or start them when a rollout begins."
            )
    return ""


def _end_session() -> None:
    """Kill what is left of the session: the pairs, and the programs of their environments."""
    for name in os.listdir("/proc"):
        with suppress(ValueError, ProcessLookupError):
            if int(name) != os.getpid() and os.getsid(int(name)) == os.getpid():
                os.kill(int(name), signal.SIGKILL)


def _begin(zygote: int) -> None:
    """Let a forked process end with the zygote, and draw other numbers than its siblings."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != zygote:
        os._exit(1)
    os.setpgid(0, 0)  # so that its programs end with it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:  # Python's own generator does it by itself
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
