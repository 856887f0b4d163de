"""The sandbox of this machine: runs a program in a process that is shut in by the Linux kernel."""

from __future__ import annotations

import functools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from environments.errors import ConfigError, EnvironmentFailure
from environments.sandbox import child, process_tree
from environments.sandbox.base import DEFAULT_LIMITS, SandboxLimits, SandboxResult
from environments.sandbox.outcome import make_result

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("child.py")
_INTERPRETER_START_SECONDS = 60.0
"""An interpreter takes 0.03; on a machine that is short of memory, much longer."""

_COUNT_SECONDS = 0.2
_MARK = "TROUPE_SANDBOX"
_NO_NAMESPACES = (
    "This machine allows no user namespaces (unshare(CLONE_NEWUSER), and mount_setattr of Linux 5.12): "
    "programs of a model may read files of this user, reach its processes, and forge their rewards."
)
_ALLOW = (
    "Allow them: in a container by the options --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined, on the machine by the setting user.max_user_namespaces above 0."
)
_REMEDY = (
    f"{_ALLOW} Or use a container for each program: CommandSandbox. Or choose to run without: "
    "sandbox='best-effort'."
)
ISOLATIONS = ("required", "best-effort")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH")  # without them, some interpreters do not start


@dataclass(frozen=True)
class LocalSandbox:
    """Runs programs as processes of this machine, in namespaces of their own.

    A program runs in a fresh interpreter with the installed packages, in an empty directory that is removed
    afterwards, without the parent's environment variables. It has no network, sees no other process (in a
    container that masks /proc: their names), can write nowhere else, and can read nothing else but the
    system's programs and the packages: no home, no data set, no /tmp. When it ends, all processes that it
    started are killed. Takes about 50 ms more than the program does.

    Args:
        isolation: "required", or "best-effort": where the kernel denies namespaces, programs run all the
            same, kept in by landlock and seccomp as far as it has them (``restrictions``). Without them, a
            process that first killed its supervisor and cleared its own environment can get away.
        folders: Absolute paths of empty folders that a program may write to besides its own, such as
            ("/app",). None lies in another one, and they require isolation.
    """

    isolation: Literal["required", "best-effort"] = "required"
    folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATIONS:
            raise ConfigError(
                f"LocalSandbox.isolation={self.isolation!r} is unknown: use one of {', '.join(ISOLATIONS)}."
            )
        if self.isolation == "best-effort":
            announce_best_effort()
        system = [*child.seen_paths(), "/dev", "/proc", tempfile.gettempdir()]
        for number, folder in enumerate(self.folders):
            others = [other for other in (*system, *self.folders[:number]) if _overlap(folder, other)]
            if others or not os.path.isabs(folder):
                raise ConfigError(
                    f"LocalSandbox.folders has {folder!r}: use an absolute path, such as /app, neither "
                    f"within nor around another one, the system's or the packages' ({', '.join(others)})."
                )

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
        """Run ``source`` and return its result, see ``Sandbox``.

        Raises:
            EnvironmentFailure: the interpreter did not start, or isolation is required and the kernel does
                not allow it.
        """
        begin = time.monotonic()
        with ExitStack() as stack:
            # Files and not pipes: no thread has to read them, a full one stops its writer, and a grandchild
            # that keeps one open delays no result.
            files = _Files(*(stack.enter_context(tempfile.TemporaryFile()) for _ in range(5)))
            _fill(files.program, source)
            _fill(files.stdin, stdin)
            directory = tempfile.mkdtemp(prefix="sandbox-")
            stack.callback(process_tree.remove_folder, directory)
            with _Supervisor(self, files, directory, limits) as supervisor:
                end = supervisor.wait()
            seconds = time.monotonic() - begin
            return make_result(files.output(limits.output_bytes), end, limits, supervisor.isolated, seconds)


@dataclass(frozen=True)
class BestEffortSandbox(LocalSandbox):
    """The local sandbox that runs programs where they cannot be isolated, too: "best-effort" by name."""

    isolation: Literal["required", "best-effort"] = "best-effort"


@dataclass(frozen=True)
class _Files:
    """The program's input and output. The files have no names, so closing them removes them."""

    program: IO[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    report: IO[bytes]

    def output(self, most: int) -> tuple[bytes, bytes, bytes]:
        """The program's stdout and stderr, ``most`` bytes of each, and its report."""
        report = os.pread(self.report.fileno(), child.MAX_REPORT_BYTES, 0)
        return child.kept(self.stdout.fileno(), most), child.kept(self.stderr.fileno(), most), report


class EnclosedProgram(process_tree.Supervised):
    """A command in namespaces of its own, which keeps the files of ``folder``; see ``child.enclose``.

    Attributes:
        listener: listens at ``address`` of the program's own loopback; this process answers there.

    Args:
        visible: paths that it may read besides the system's and the packages'.
        file_bytes: size of any file.

    Raises:
        ConfigError: it was not started, since this machine does not let it be shut in.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        output: IO[bytes],
        address: str,
        visible: Sequence[str],
        file_bytes: int,
    ) -> None:
        host, _, port = address.partition(":")
        settings: dict[str, Any] = {"command": command, "directory": folder, "visible": visible}
        settings |= {"address": (host, int(port)), "file_bytes": file_bytes}
        inside = [sys.executable, "-I", str(_CHILD), json.dumps(settings)]
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                super().__init__(inside, folder, variables, output, theirs.fileno())
            ours.settimeout(_INTERPRETER_START_SECONDS)
            received: list[int] = []
            with suppress(TimeoutError):
                received = socket.recv_fds(ours, 1, 1)[1]
        if not received:
            self.end()
            shown = child.kept(output.fileno(), 2000).decode("utf-8", "replace")
            raise ConfigError(
                f"{_NO_NAMESPACES} {_ALLOW} Or run this program without: isolated=False. {shown}"
            )
        self.listener = socket.socket(fileno=received[0])
        self.listener.set_inheritable(False)  # unlike one that is made here, one that comes is


class _Supervisor:
    """The process that runs the program, see ``child``. Leaving the block leaves none behind."""

    def __init__(self, sandbox: LocalSandbox, files: _Files, directory: str, limits: SandboxLimits) -> None:
        self.isolated = False
        self._files = files
        self._directory = directory
        self._limits = limits
        self._isolation_required = sandbox.isolation == "required" or bool(sandbox.folders)
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._received = b""
        self._status_fd, status_fd = os.pipe()
        settings = asdict(limits) | {"parent": os.getpid(), "directory": directory, "status_fd": status_fd}
        settings |= {"program_fd": files.program.fileno(), "report_fd": files.report.fileno()}
        settings |= {"folders": sandbox.folders, "isolation_required": self._isolation_required}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), json.dumps(settings)],
                stdin=files.stdin,
                stdout=files.stdout,
                stderr=files.stderr,
                pass_fds=(settings["program_fd"], settings["report_fd"], status_fd),
                cwd=directory,
                env=_environment(directory, self._mark),
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._status_fd)
            raise EnvironmentFailure(f"The sandbox cannot start {sys.executable}: {error}.") from error
        finally:
            os.close(status_fd)

    def __enter__(self) -> _Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._status_fd)
        # Before it is reaped, so that its number cannot have become another's.
        if self.isolated:  # all others end with the first process of their namespace, and then this one does
            with suppress(OSError, subprocess.TimeoutExpired):
                for first in process_tree.children(self._process.pid):
                    os.kill(first, signal.SIGKILL)
                self._process.wait(process_tree.KILL_SECONDS)
        else:
            self._signal(signal.SIGSTOP)  # not killed yet: its descendants are found by it
            process_tree.kill_started(self._process.pid, self._mark)
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait(process_tree.KILL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self) -> dict[str, Any] | None:
        """Wait until the program ended, at most ``timeout_seconds`` from its start; None if it was not done.

        Raises:
            EnvironmentFailure: it did not even start, or was not isolated as required.
        """
        start = json.loads(self._next_line(_INTERPRETER_START_SECONDS) or "{}")
        if "isolated" not in start:  # the process of the program has failed, or the supervisor
            stderr = child.kept(self._files.stderr.fileno(), 2000)
            output = stderr.decode("utf-8", "replace").strip() or "no output"
            raise EnvironmentFailure(f"The sandbox's interpreter {sys.executable} did not start: {output}.")
        self.isolated = start["isolated"]
        if self._isolation_required and not self.isolated:
            raise EnvironmentFailure(f"{_NO_NAMESPACES} {_REMEDY}")
        if not self.isolated:
            warn_of_no_isolation()
        return self._wait_for_end(time.monotonic() + self._limits.timeout_seconds)

    def _wait_for_end(self, deadline: float) -> dict[str, Any] | None:
        """Wait for the end of the program, or until all of it together uses more than the limits.

        The count is not the kernel's: a cgroup would need rights that few machines give.
        """
        limits = self._limits
        while (left := deadline - time.monotonic()) > 0:
            end = self._next_line(min(left, _COUNT_SECONDS))
            if end is not None:
                return dict(json.loads(end or '{"status": 9, "cpu_seconds": 0}'))
            processes = process_tree.children(self._process.pid)
            usage = process_tree.usage_of(processes, limits.memory_bytes, child.MAX_PROCESSES, deadline)
            if usage.memory_bytes > limits.memory_bytes or usage.num_threads > child.MAX_PROCESSES:
                return {"status": 9, "cpu_seconds": 0, "out_of_memory": True}
            if usage.cpu_seconds > limits.cpu_seconds:
                return None
            if not self.isolated and not self._files_fit():
                return {"status": 9, "cpu_seconds": 0}
        return None

    def _files_fit(self) -> bool:
        """Return whether the files are within the limits, for which a namespace has a file system."""
        size = process_tree.bytes_within(self._directory, child.MAX_FILES)
        return size is not None and size <= self._limits.file_bytes

    def _next_line(self, seconds: float) -> bytes | None:
        """The supervisor's next line; empty if it is dead, None if it writes none for ``seconds``."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._status_fd, select.POLLIN)
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            received = os.read(self._status_fd, 4096)
            if not received:
                return b""
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


def _overlap(one: str, other: str) -> bool:
    """Return whether two folders are the same, or one lies in the other."""
    paths = [Path(os.path.normpath(each)) for each in (one, other)]
    return paths[0].is_relative_to(paths[1]) or paths[1].is_relative_to(paths[0])


def _environment(directory: str, mark: str) -> dict[str, str]:
    """The program's environment variables. None of ours that may hold a token or a key."""
    name, _, value = mark.partition("=")
    kept = {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return kept | threads | {"HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", name: value}


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)  # flushes too


@functools.cache
def announce_best_effort() -> None:
    """Warn once in a process that isolation is not required, also in the process that starts a run."""
    logger.warning(
        "The sandbox is best-effort: on a node that denies namespaces, programs of a model run without, and "
        "may forge their rewards. Choose sandbox='local' to require isolation."
    )


@functools.cache
def warn_of_no_isolation() -> None:
    """Warn, once in a process, that this machine cannot isolate programs."""
    logger.warning("%s Programs run all the same, by LocalSandbox.isolation=best-effort.", _NO_NAMESPACES)
