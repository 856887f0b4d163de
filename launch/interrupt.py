"""Ctrl-C and SIGTERM arrive between two pieces of work, never inside one that must be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt``, put off while work is ``whole``.

    A second signal is not put off: who asks twice wants out.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False
        self.torn = False
        """Whether a second signal has cut off what was to be whole: what it left is no state to save."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in the block. Does nothing outside the main thread, where Python cannot."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self._handle) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Finish the block before an interrupt is raised."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and self._depth == 0:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._depth and not self._pending:
            self._pending = True
            return
        self._pending, self.torn = False, self._depth > 0
        raise KeyboardInterrupt
