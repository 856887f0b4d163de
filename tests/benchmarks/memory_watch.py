"""How much memory a benchmark's programs take together, by what the machine has less of meanwhile."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

LOOK_SECONDS = 0.5


class MemoryWatch:
    """A context that looks twice a second how much less memory is available than when it began.

    This counts processes, what they share (once) and Ray's object store, and no cache of files. It also
    counts programs that do not belong to the benchmark, if they grow meanwhile.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._before = psutil.virtual_memory().available
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self._before - psutil.virtual_memory().available)
