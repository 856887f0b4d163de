"""A free port, the state of a process, a wait with an end, and what a call costs."""

from __future__ import annotations

import gc
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Return when ``condition`` holds; fail after ``seconds``: many, for a busy machine stalls."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """True unless the process has ended, or nobody has looked after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port on which no program listens. Connections of other programs begin at ports above these, so that
    none of them takes it before it is used."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_768)))
            return int(free.getsockname()[1])


def cpu_seconds(call: Callable[[], object], attempts: int = 3) -> float:
    """The CPU seconds of the cheapest of some calls: what this process does besides in one of them, such as
    the collection of all the garbage of a thousand tests, is no cost of the call."""
    seconds = []
    for _ in range(attempts):
        gc.collect()
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)
