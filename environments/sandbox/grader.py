"""Runs a function that may hang, crash or eat all memory where it can be ended: in a child process."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from environments.errors import EnvironmentFailure, TroupeError
from environments.sandbox import child
from environments.sandbox.local import warn_of_no_isolation

_GRADER_START_SECONDS = 120.0
"""Importing sympy takes 0.5 when nothing else runs; with 64 actors starting, much longer."""
_STATUS_SECONDS = 2.0
"""Time in which a process that has closed its socket may end, so that its own status is known."""
_KILL_SECONDS = 10.0
_ORPHAN_SECONDS = 1.0
_MAX_ERROR_LENGTH = 500
_FILE_BYTES = 16 << 20  # of all that a confined child writes; some libraries do not start without


class GradingError(TroupeError):
    """A call gave no result: it ran too long, raised, or its process died. The text says which."""


class Grader:
    """A pure function, run in one child process that is kept for the next call and can be ended.

    The child starts with the first call, imports ``imports`` once, and only then does a call's time begin
    to run. A child that does not answer in time, or dies, costs that call alone: the next one gets a fresh
    child. Threads take turns, since a child of some 60 MB per thread would cost more than the waiting.
    A process that forks starts a child of its own. The child ends when its parent does, at the latest one
    second after the time limit of its current call.

    Args:
        function: ``"module:name"``, importable from where this process imports. Its arguments and result
            have to be JSON.
        imports: Modules that the function imports when it runs.
        memory_bytes: The address space of the child; beyond it the function gets a MemoryError.
        confined: Whether the child is shut in like a program in the local sandbox, for a function that may
            execute its arguments: no network, no other processes, no file that it can write but its
            own, in memory. Where the kernel does not allow that, a warning says so.
    """

    def __init__(
        self, function: str, imports: Sequence[str] = (), memory_bytes: int = 1 << 30, confined: bool = False
    ) -> None:
        self._settings = {"function": function, "imports": list(imports), "memory_bytes": memory_bytes}
        self._settings["confined"] = confined
        self._lock = threading.Lock()
        self._child: _Child | None = None
        os.register_at_fork(after_in_child=self._forget)

    def call(self, *arguments: Any, time_limit_seconds: float) -> Any:
        """Return what the function returns.

        Raises:
            GradingError: there is no result.
            EnvironmentFailure: no child could be started, so no call can succeed.
        """
        request = {"arguments": arguments, "seconds": time_limit_seconds}
        with self._lock:
            child = self._child if self._child and self._child.is_alive() else _Child(self._settings)
            self._child = None  # in any case, a child that owes an answer is not used again
            try:
                answer = child.request(request, time_limit_seconds)
            except TimeoutError as error:
                child.end()
                raise GradingError(f"could not be graded in {time_limit_seconds:g} s.") from error
            except ConnectionError as error:
                raise GradingError(f"the grading process died ({child.end(_STATUS_SECONDS)}).") from error
            except BaseException:
                child.end()
                raise
            self._child = child
        if "error" in answer:
            raise GradingError(f"the grading function raised {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End the child, if there is one; the next call starts another."""
        with self._lock:
            child, self._child = self._child, None
            if child:
                child.end()

    def _forget(self) -> None:
        """Forget the child after a fork: it is the other process's, and so may be the thread that held the
        lock."""
        self._lock = threading.Lock()
        child, self._child = self._child, None
        if child:
            child.connection.close()


class _Child:
    """A process that runs ``serve``, and our end of the socket to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # ours may be the output of a command
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                start_new_session=True,  # Ctrl-C is for us
            )
        try:
            answer = self.request(settings, _GRADER_START_SECONDS)
        except OSError as error:
            raise EnvironmentFailure(
                f"The process that runs {settings['function']} was not ready within "
                f"{_GRADER_START_SECONDS:g} s, and ended ({self.end(_STATUS_SECONDS)}): its error stands "
                "above; look at the memory of this machine."
            ) from error
        except BaseException:
            self.end()
            raise
        if "error" in answer:
            self.end()
            raise EnvironmentFailure(
                f"{settings['function']} cannot be run: {answer['error']}. Install what is missing."
            )
        if settings["confined"] and not answer["value"]:
            warn_of_no_isolation()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            TimeoutError: it did not come in time.
            ConnectionError: the process died, or the function has written nonsense to our socket.
        """
        deadline = time.monotonic() + seconds
        self.connection.settimeout(max(seconds, 1e-3))
        _send(self.connection, message)
        try:
            answer = _receive(self.connection, deadline)
        except (ValueError, RecursionError) as error:
            raise ConnectionError from error
        if not isinstance(answer, dict) or not answer.keys() & {"value", "error"}:
            raise ConnectionError
        return answer

    def end(self, seconds: float = 0.0) -> str:
        """Kill the process unless it ends by itself within ``seconds``, and return how it ended."""
        self.connection.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait(_KILL_SECONDS)
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def serve(descriptor: int) -> None:
    """Be the child: prepare as the first message says, then answer every further message."""
    connection = socket.socket(fileno=descriptor)
    settings = _receive(connection)
    if settings is None:
        return
    isolated = settings["confined"] and _shut_in()
    prepared = _answer(_prepare, settings)
    _send(connection, {"value": isolated} if "value" in prepared else prepared)
    if "error" in prepared:
        return
    function = pkgutil.resolve_name(settings["function"])
    while (request := _receive(connection)) is not None:
        # If this hangs when our parent is gone, the kernel ends us, even where Python cannot.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + _ORPHAN_SECONDS)
        answer = _answer(function, *request["arguments"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, answer)


def _shut_in() -> bool:
    """Go on in a process that the kernel keeps from everything else; return whether it does."""
    # One folder for all graders, since a killed grader could not remove its own. Each mounts its own on it.
    directory = os.path.join(tempfile.gettempdir(), "troupe-grader")
    with suppress(OSError):
        os.makedirs(directory, exist_ok=True)
    if not child.leave_namespaces():
        return False
    for parent in (0, 1):  # its number in the new namespace, whose first process ignores the timer's signal
        process = os.fork()
        if process:
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        child.die_with_parent(parent)
    closed = child.close_files(directory, _FILE_BYTES)
    if closed:
        os.environ |= {"HOME": directory, "TMPDIR": directory}
        tempfile.tempdir = None  # to be looked up again
    child.give_up_rights()
    return closed


def _prepare(settings: dict[str, Any]) -> None:
    for module in settings["imports"]:
        importlib.import_module(module)
    pkgutil.resolve_name(settings["function"])
    child.limit(resource.RLIMIT_CORE, 0)
    child.limit(resource.RLIMIT_AS, settings["memory_bytes"])


def _answer(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    try:
        value = function(*arguments)
        json.dumps(value)
    except Exception as error:  # noqa: BLE001  (the parent raises it again)
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]}
    return {"value": value}


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """Return the next message, a line that nothing follows, or None at the end of the connection."""
    received = bytearray()
    while not received.endswith(b"\n"):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(1 << 16)
        if not part:
            return None
        received += part
    return json.loads(received)
