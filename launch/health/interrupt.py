"""Interrupts: Ctrl-C and SIGTERM arrive between two pieces of work, never inside one that must be whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt``, after an ``atomic_section`` if they come in one.

    A second signal does not wait for its end: the user wants the program to end now.
    """

    def __init__(self) -> None:
        self._depth = 0
        self.is_pending = False
        """True for a signal in an atomic section that an error has ended before the interrupt was raised."""
        self._raised = False
        self.was_cut = False
        """True once an error or a second signal has ended an atomic section early: its state is not saved."""
        self.error: Exception | None = None
        """Cause of the run's end, where it was not a person."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in the block. Does nothing outside the main thread, where Python cannot."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in INTERRUPTS}
        self.install()
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def install(self) -> None:
        """Handle the signals, also where a library has put its own handler in the place of ours."""
        if threading.current_thread() is threading.main_thread():
            for each in INTERRUPTS:
                signal.signal(each, self._handle)

    def end_with(self, error: Exception) -> None:
        """Raise ``KeyboardInterrupt`` in the main thread, whatever it is doing, because of ``error``.

        Another thread calls this when it finds that the run cannot go on.
        """
        self.error = error
        self.is_pending = True  # not put off
        os.kill(os.getpid(), signal.SIGINT)

    def raise_if_interrupted(self) -> None:
        """Raise an interrupt that was raised before and swallowed.

        Libraries that catch whatever an import raises swallow it, and so does Python in a ``__del__``.
        """
        if self._raised:
            raise KeyboardInterrupt

    @contextmanager
    def atomic_section(self) -> Iterator[None]:
        """Finish the block before an interrupt is raised."""
        self._depth += 1
        try:
            yield
        except BaseException:
            self.was_cut = True
            raise
        finally:
            self._depth -= 1
        if self.is_pending and self._depth == 0:
            self.is_pending, self._raised = False, True
            raise KeyboardInterrupt

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._depth and not self.is_pending:
            self.is_pending = True
            return
        self.is_pending, self._raised = False, True
        raise KeyboardInterrupt
