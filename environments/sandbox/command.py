"""The sandbox of a command: runs each program in a container that a command of the user starts."""

from __future__ import annotations

import functools
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from environments.errors import ConfigError, EnvironmentFailure
from environments.sandbox import child, runner
from environments.sandbox.base import DEFAULT_LIMITS, SandboxLimits, SandboxResult, clip
from environments.sandbox.outcome import make_result

logger = logging.getLogger(__name__)

_CONTAINER_EXIT_SECONDS = 5.0  # for a container to go away by itself once its reply is here
_STOP_SECONDS = 30.0
_MAX_LINE_BYTES = 1 << 16
_MAX_NOISE_BYTES = 1 << 20  # of the image or the command, beside the runner's messages
_MAX_STDERR_BYTES = 2000  # kept of the command's own stderr
_END_OF_KILLED = {"status": int(signal.SIGKILL), "cpu_seconds": 0.0}


@dataclass(frozen=True)
class CommandSandbox:
    """Runs each program in a container of its own, for example with Docker, Podman or gVisor.

    Isolation is the command's: this class only starts it, limits time and output, and stops it. The image
    needs Python 3.10 or newer, and nothing of Troupe. The program's limits are set in the container too,
    except that ``memory_bytes`` counts per process there: give the total to the command.

    Args:
        command: Starts a Python interpreter in a fresh container, with stdin, stdout and stderr passed on,
            for example ``["docker", "run", "--rm", "-i", "--name={name}", "--network=none",
            "--memory={memory_bytes}", "python:3.12-slim", "python"]``; the interpreter's arguments are added
            at its end. In each part, ``{name}`` stands for the container's name, which is unique, and the
            field of ``SandboxLimits`` for its value; a brace of one's own is doubled.
        stop: Ends the container ``{name}``, for example ``["docker", "kill", "{name}"]``. It is run when a
            container does not end by itself. Without it, only the command is killed, and containers of a
            daemon would go on.
        start_seconds: For the command to start Python, pulling of the image included.
        reply_seconds: For the container to send the result, after the program's own time limit.
    """

    command: Sequence[str]
    stop: Sequence[str] = ()
    start_seconds: float = 120.0
    reply_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field, template in (("command", self.command), ("stop", self.stop)):
            if isinstance(template, str):
                raise ConfigError(f"CommandSandbox.{field}={template!r} is a text: pass a list of its parts.")
            _filled(field, template, "name", DEFAULT_LIMITS)
        if not self.command:
            raise ConfigError('CommandSandbox.command is empty: pass one, such as ["docker", "run", ...].')
        if self.stop and not any("{name}" in part for part in self.command):
            raise ConfigError(
                f"CommandSandbox.command={list(self.command)} does not name its container, so that "
                f"stop={list(self.stop)} cannot end it: add a part such as --name={{name}}."
            )

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
        """Run ``source`` and return its result, see ``Sandbox``.

        Raises:
            EnvironmentFailure: the command cannot be started, or Python did not start in ``start_seconds``,
                or ``stop`` does not answer.
        """
        begin = time.monotonic()
        name = f"troupe-{uuid.uuid4().hex}"
        with tempfile.TemporaryFile() as given:
            given.write(_given(name, source, stdin, limits))
            given.seek(0)
            with _Container(self, name, given, limits) as container:
                container.wait_for_start()
                end, output = container.reply()
        return make_result(output, end, limits, isolated=None, seconds=time.monotonic() - begin)


class _Container:
    """A running command, and the container that it started. Leaving the block ends both."""

    def __init__(self, sandbox: CommandSandbox, name: str, given: IO[bytes], limits: SandboxLimits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._prefix = f"{name} ".encode()
        self._stop = _filled("stop", sandbox.stop, name, limits)
        self._command = _filled("command", sandbox.command, name, limits)
        self._replied = False
        self._received = bytearray()
        self._stderr = b""
        try:
            self._process = subprocess.Popen(
                [*self._command, "-I", "-c", _interpreter_source()],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFailure(
                f"The sandbox's command {self._shown()} cannot be started on {socket.gethostname()}: "
                f"{error}. Install it on every node that runs programs, or correct CommandSandbox.command."
            ) from error
        self._selector = selectors.DefaultSelector()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ)

    def __enter__(self) -> _Container:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with suppress(subprocess.TimeoutExpired):
                if self._replied:
                    self._process.wait(_CONTAINER_EXIT_SECONDS)
                    return
            self._end_container()
        except EnvironmentFailure as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            with self._process, suppress(ProcessLookupError):  # it closes the pipes, and waits
                os.killpg(self._process.pid, signal.SIGKILL)
            self._selector.close()

    def wait_for_start(self) -> None:
        """Return when the program begins.

        Raises:
            EnvironmentFailure: the command ended before that, or took longer than ``start_seconds``.
        """
        deadline = time.monotonic() + self._sandbox.start_seconds
        try:
            self._next_message(deadline)
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"The sandbox's command {self._shown()} has not started Python within "
                f"{self._sandbox.start_seconds:g} s. {self._errors()} Check that its daemon answers, "
                "pull the image beforehand, or raise CommandSandbox.start_seconds."
            ) from error
        except EOFError as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CONTAINER_EXIT_SECONDS)
            raise EnvironmentFailure(
                f"The sandbox's command {self._shown()} ended with exit status {self._process.poll()} before "
                f"it started a program. {self._errors()} Check that its daemon runs and has the image, and "
                "try it by hand: it has to pass stdin and stdout on, and to start Python 3.10 or newer."
            ) from error

    def reply(self) -> tuple[dict[str, Any] | None, tuple[bytes, bytes, bytes]]:
        """Return how the program ended, None at the time limit, and its stdout, stderr and report.

        The runner keeps the time limit. Where it does not answer, the program has stopped or killed it, or
        the container has run out of memory: there is no output then.
        """
        deadline = time.monotonic() + self._limits.timeout_seconds + self._sandbox.reply_seconds
        nothing = (b"", b"", b"")
        try:
            message = self._next_message(deadline)
            most = self._limits.output_bytes + _MAX_LINE_BYTES
            sizes = [min(size, most) for size in message["sizes"][:2]]
            sizes.append(min(message["sizes"][2], child.MAX_REPORT_BYTES))
            stdout, stderr, report = (self._take(size, deadline) for size in sizes)
        except TimeoutError:
            return None, nothing
        except EOFError:
            return _END_OF_KILLED, nothing
        self._replied = True
        return message["end"], (stdout, stderr, report)

    def _next_message(self, deadline: float) -> dict[str, Any]:
        """Return the runner's next message, and skip lines of the image or the command."""
        noise = 0
        while not (line := self._next_line(deadline)).startswith(self._prefix):
            noise += len(line)
            if noise > _MAX_NOISE_BYTES:
                raise EOFError
        message = json.loads(line.removeprefix(self._prefix))
        assert isinstance(message, dict)
        return message

    def _next_line(self, deadline: float) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _MAX_LINE_BYTES:
                raise EOFError
            self._receive(deadline)
        return self._take(end + 1, deadline)

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            self._receive(deadline)
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _receive(self, deadline: float) -> None:
        """Wait for output of the command: TimeoutError at the deadline, EOFError at the end of stdout."""
        ready = self._selector.select(max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
            if key.fileobj is self._process.stderr:
                self._stderr = (self._stderr + data)[-_MAX_STDERR_BYTES:]
            elif data:
                self._received += data
            else:
                self._drain_stderr()
                raise EOFError

    def _drain_stderr(self) -> None:
        """Read the rest of stderr, where the command says why it ended."""
        with suppress(EOFError, TimeoutError):
            while self._selector.get_map():
                self._receive(time.monotonic() + 1)

    def _end_container(self) -> None:
        """Run the stop command, if there is one."""
        if not self._stop:
            return
        shown = " ".join(self._stop)
        remedy = "the container may go on, so end it by hand, and correct CommandSandbox.stop or the daemon"
        try:
            done = subprocess.run(
                self._stop, stdin=subprocess.DEVNULL, capture_output=True, timeout=_STOP_SECONDS, check=False
            )
        except OSError as error:
            raise EnvironmentFailure(f"'{shown}' cannot be started ({error}): {remedy}.") from error
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailure(f"'{shown}' took more than {_STOP_SECONDS:g} s: {remedy}.") from error
        if done.returncode:  # also where the container has just ended by itself
            output = done.stderr.decode("utf-8", "replace").strip()
            logger.warning("'%s' ended with exit status %d: %s", shown, done.returncode, clip(output, 500))

    def _shown(self) -> str:
        return f"'{' '.join(self._command)}'"

    def _errors(self) -> str:
        output = self._stderr.decode("utf-8", "replace").strip()
        return f"Its stderr: {output!r}." if output else "Its stderr is empty."


def _filled(field: str, template: Sequence[str], name: str, limits: SandboxLimits) -> list[str]:
    """The parts of a command with their placeholders filled in."""
    values = {"name": name, **asdict(limits)}
    try:
        return [part.format_map(values) for part in template]
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"CommandSandbox.{field}={list(template)} has a placeholder that is not known ({error}): use "
            f"{', '.join(f'{{{key}}}' for key in values)}, and double a brace that is meant as one."
        ) from error


def _given(name: str, source: str, stdin: str, limits: SandboxLimits) -> bytes:
    """The runner's input, see there."""
    program, data = source.encode("utf-8", "replace"), stdin.encode("utf-8", "replace")
    request = {"name": name, "program_bytes": len(program), "stdin_bytes": len(data), **asdict(limits)}
    header = json.dumps(request).encode()
    return b"".join([f"{len(header):0{runner.SIZE_DIGITS}}".encode(), header, program, data])


@functools.cache
def _interpreter_source() -> str:
    """The text of the runner and of ``child``, which it imports; the image has no file of this project.

    Both are compiled under the name that Python gives to an argument, which ``child`` leaves out of the
    tracebacks of a program.
    """
    child_text, runner_text = (Path(module.__file__ or "").read_text("utf-8") for module in (child, runner))
    return (
        "import sys, types\n"
        f"name = {child.__name__!r}\n"
        "for part in ('environments', 'environments.sandbox', name):\n"
        "    sys.modules[part] = types.ModuleType(part)\n"
        "child = sys.modules['environments.sandbox'].child = sys.modules[name]\n"
        "child.__file__ = '<string>'\n"
        f"exec(compile({child_text!r}, '<string>', 'exec'), vars(child))\n"
        f"exec(compile({runner_text!r}, '<string>', 'exec'), globals())\n"
    )
