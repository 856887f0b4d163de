"""The time limit of a rollout, kept by a thread that interrupts the main one."""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from types import FrameType
from typing import Self

from actors.timing import LIMIT_REPEAT_SECONDS

SIGNAL = signal.SIGRTMAX
"""A signal without another user: environments and graders set alarms (``SIGALRM``), Java suspends its
threads by ``SIGUSR2``, and .NET takes real-time signals from the other end."""


class TimeLimitReached(KeyboardInterrupt):
    """Raised in the main thread when a rollout has had its time.

    No ``Exception``, so that an environment that catches those is interrupted too; and Ray's waiting calls
    let only a ``KeyboardInterrupt`` through.
    """


class TimeLimit:
    """Interrupts blocks of the main thread, which makes it, when they take too long; one at a time.

    Its thread is started with it and serves all blocks: one that begins when the process has used up its
    memory could not start another.
    """

    def __init__(self) -> None:
        self._deadline = math.inf
        self._waits: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        """Seconds to wait for the next one of these before the signal is sent; ``None`` is for ever. No
        other queue may be used in a signal's handler."""
        self._main_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()

    def of(self, seconds: float) -> Self:
        """Limit the block of a ``with``: raise ``TimeLimitReached`` in it, once, after ``seconds``.

        Once the ``with`` is left, nothing is interrupted any more, however late the signal comes.
        """
        # It stays, since a signal that comes late would end the process; it does nothing when nothing is due.
        signal.signal(SIGNAL, self._interrupt)
        self._deadline = time.monotonic() + seconds
        self._waits.put(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._deadline = math.inf
        self._waits.put(None)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if time.monotonic() >= self._deadline:
            self._end()
            raise TimeLimitReached

    def _watch(self) -> None:
        seconds: float | None = None
        while True:
            try:
                seconds = self._waits.get(timeout=seconds)
            except queue.Empty:
                signal.pthread_kill(self._main_thread, SIGNAL)
                # One that comes just before the thread begins to sleep wakes no thread.
                seconds = LIMIT_REPEAT_SECONDS
