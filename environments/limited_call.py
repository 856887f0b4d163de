"""Calls of foreign code with a time limit, whose exceptions go into a report, for ``check_environment``."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Self

from environments.errors import ConfigError
from environments.report import Report

SIGNAL_HINT = (
    "Python allows that in the main thread alone, where rollouts run, but not this check: the code "
    "after it was not checked."
)


class Failed(Exception):
    """A call failed, and the report says why. Other checks may go on."""


class GiveUp(Exception):
    """The report holds an error after which nothing more should be tried."""


class NoSecondReset(Failed):
    """The environment plays one episode only, and the report says so."""


class Caller:
    """Runs foreign calls one by one in a thread of their own, since an environment may depend on that.

    Args:
        limits: seconds that a call may take, by the arguments of ``check_environment``.
    """

    def __init__(self, report: Report, limits: Mapping[str, float]) -> None:
        self.report = report
        self._limits = limits
        self._stuck = False
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        threading.Thread(target=self._work, name="check_environment", daemon=True).start()

    def call(
        self,
        name: str,
        function: Callable[[], Any],
        hint: str = "",
        note: Callable[[str], None] | None = None,
        limit: str = "timeout_seconds",
        check: Callable[[Any], list[str]] | None = None,
    ) -> Any:
        """Return the value of ``function``; after its exception or a fault raise Failed, after a hang GiveUp.

        An exception is reported as an error, or by ``note``, with ``hint`` below, unless it is a ConfigError,
        which says itself what to do. ``limit`` names the time limit of the call, and ``check`` finds the
        faults of its value, which are errors.
        """
        seconds = self._limits[limit]
        if self._stuck:
            raise GiveUp
        self._jobs.put(function)
        try:
            value, error = self._results.get(timeout=seconds)
        except Empty:
            self._stuck = True
            self.report.error(
                f"{name} has not returned within {seconds:g} s. Give everything that it waits for a time "
                f"limit, or raise {limit} if it is only slow."
            )
            raise GiveUp from None
        if error is not None:
            if isinstance(error, ValueError) and "only works in main thread" in str(error):
                note, hint = self.report.warn, SIGNAL_HINT
            if isinstance(error, ConfigError):
                hint = ""
            note = note or self.report.error
            note("\n".join(filter(None, [f"{name} raised {_described(error)}", hint])))
            raise Failed
        if check is not None and (faults := check(value)):
            self.report.error(*faults)
            raise Failed
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put((job(), None))
            except BaseException as error:  # noqa: BLE001  (call() reports it; sys.exit() is no exit from here)
                self._results.put((None, error))


def _described(error: BaseException) -> str:
    """The exception, and below it the last lines of the user's code on the way to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    lines = [traceback.format_exception_only(error)[-1], *traceback.format_list(frames[-3:])]
    return "".join(lines).rstrip()
