"""Calls of foreign code in a thread of its own, and the report of their faults for ``check_environment``."""

from __future__ import annotations

import textwrap
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from environments.errors import ConfigError, EnvironmentFailure

T = TypeVar("T")

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


@dataclass
class Report:
    """The findings of ``check_environment``; its ``str()`` is for a person to read.

    An error breaks rollouts or falsifies rewards; a warning is about code that works, but may surprise.
    """

    environment: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether there is no error."""
        return not self.errors

    def raise_if_faulty(self) -> None:
        """Raise an EnvironmentFailure with the report as its message, if there is an error."""
        if not self.ok:
            raise EnvironmentFailure(str(self))

    def error(self, *texts: str) -> None:
        """Add errors, each once."""
        self.errors += [text for text in texts if text not in self.errors]

    def warn(self, *texts: str) -> None:
        """Add warnings, each once."""
        self.warnings += [text for text in texts if text not in self.warnings]

    def __str__(self) -> str:
        if not self.errors and not self.warnings:
            return f"{self.environment}: all fine."
        found = [f"error: {text}" for text in self.errors] + [f"warning: {text}" for text in self.warnings]
        return "\n".join([f"{self.environment}:", *(textwrap.indent(text, "  ") for text in found)])


class CallThread:
    """Thread in which foreign code does all of its work: some code wants the same one for every call.

    A call that hangs keeps this thread, and not the program.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Do ``call`` after those before it; return the place of its result, or of what it raises."""
        answer = Future[T]()
        self._calls.put((call, answer))
        return answer

    def end(self) -> None:
        """End the thread when its work is done."""
        self._calls.put(None)

    def _run(self) -> None:
        while (begun := self._calls.get()) is not None:
            call, answer = begun
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001  # the caller raises it; sys.exit() is no exit from here
                answer.set_exception(error)


class Caller:
    """Runs foreign calls one by one in a thread of their own, since an environment may depend on that.

    Args:
        limits: seconds that a call may take, by the arguments of ``check_environment``.
    """

    def __init__(self, report: Report, limits: Mapping[str, float]) -> None:
        self.report = report
        self._limits = limits
        self._stuck = False
        self._thread = CallThread("check_environment")

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
        answer = self._thread.begin(function)
        wait([answer], seconds)
        if not answer.done():
            self._stuck = True
            self.report.error(
                f"{name} has not returned within {seconds:g} s. Give everything that it waits for a time "
                f"limit, or raise {limit} if it is only slow."
            )
            raise GiveUp
        if (error := answer.exception()) is not None:
            if isinstance(error, ValueError) and "only works in main thread" in str(error):
                note, hint = self.report.warn, SIGNAL_HINT
            if isinstance(error, ConfigError):
                hint = ""
            note = note or self.report.error
            note("\n".join(filter(None, [f"{name} raised {_described(error)}", hint])))
            raise Failed
        value = answer.result()
        if check is not None and (faults := check(value)):
            self.report.error(*faults)
            raise Failed
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.end()


def _described(error: BaseException) -> str:
    """The exception, and below it the last lines of the user's code on the way to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    lines = [traceback.format_exception_only(error)[-1], *traceback.format_list(frames[-3:])]
    return "".join(lines).rstrip()
