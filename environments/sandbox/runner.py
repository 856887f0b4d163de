"""The inside of a container: runs one program, and sends back its output. Started by ``command``.

It reads from stdin, in this order: the size of the request in ``SIZE_DIGITS`` digits; the request as JSON,
``{"name", "program_bytes", "stdin_bytes", "timeout_seconds", ...}``, with all of ``SandboxLimits``; the
program; its stdin. It writes to stdout a line ``name {"started": true}`` when the program begins, and at its
end a line ``name {"end", "sizes"}``, followed by ``sizes[0]`` bytes of the program's stdout, ``sizes[1]`` of
its stderr and ``sizes[2]`` of its report. ``end`` is None for a program that was stopped at
``timeout_seconds``. Other lines, such as a greeting of the image, are skipped by ``command``.

``command`` sends this text and that of ``child`` as one argument of the interpreter, so that the image needs
nothing but Python. Only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from environments.sandbox import child

SIZE_DIGITS = 20
PR_SET_DUMPABLE = 4
CHUNK_BYTES = 1 << 20
MAX_ERROR_BYTES = 2000


def main() -> None:
    """Run the program; return only in its own process, after it."""
    request = json.loads(read(int(read(SIZE_DIGITS))))
    source = read(request["program_bytes"]).decode("utf-8")
    directory = tempfile.mkdtemp(prefix="sandbox-")
    stdin, stdout, stderr, report = (os.memfd_create(name) for name in ("in", "out", "err", "report"))
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program cannot look into this process
    runner = os.getpid()
    program = os.fork()
    if program == 0:
        enter(directory, (stdin, stdout, stderr, report), theirs.fileno(), request, runner)
        theirs.send(b"!")
        if theirs.recv(1):  # nothing if the runner is gone
            theirs.close()
            child.run(source, report)
        return
    theirs.close()
    if not ours.recv(1):
        error = os.pread(stderr, MAX_ERROR_BYTES, 0).decode("utf-8", "replace")
        sys.exit(error or "the program did not start")
    # Copied after the fork, so that no memory of the program holds its stdin before it reads it. In this way
    # the rewards for code hide the tests from the solution.
    for start in range(0, request["stdin_bytes"], CHUNK_BYTES):
        write(stdin, read(min(CHUNK_BYTES, request["stdin_bytes"] - start)))
    os.lseek(stdin, 0, os.SEEK_SET)
    send(request["name"], {"started": True})
    ours.send(b"!")
    end = wait(program, request["timeout_seconds"])
    kept = [child.kept(descriptor, request["output_bytes"]) for descriptor in (stdout, stderr)]
    kept.append(os.pread(report, child.MAX_REPORT_BYTES, 0))
    send(request["name"], {"end": end, "sizes": [len(part) for part in kept]}, *kept)
    os._exit(0)


def enter(
    directory: str, files: tuple[int, int, int, int], channel: int, request: dict[str, Any], runner: int
) -> None:
    """Make this process that of the program: its directory, its standard streams, its limits."""
    child.die_with_parent(runner)
    stdin, stdout, stderr, report = files
    for descriptor, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # the old one takes it for a pipe
    lowest = 3
    for kept in (*sorted((report, channel)), os.sysconf("SC_OPEN_MAX")):
        os.closerange(lowest, kept)
        lowest = kept + 1
    os.chdir(directory)
    os.environ.update(HOME=directory, TMPDIR=directory)
    tempfile.tempdir = None  # looked up again, by the program
    child.write("/proc/self/oom_score_adj", "1000")  # short of memory, the kernel shall end this first
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else it could not open its own /dev/stdin
    child.give_up_rights()
    child.set_limits(request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def wait(program: int, seconds: float) -> dict[str, Any] | None:
    """Wait until the program ended, at most ``seconds``; then kill it and return None."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            os.kill(program, signal.SIGKILL)
            os.waitpid(program, 0)
            return None
        signal.sigtimedwait({signal.SIGCHLD}, left)
    _, status, usage = os.wait4(program, 0)
    return {"status": status, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def read(size: int) -> bytes:
    """Read exactly ``size`` bytes of stdin, without a buffer that would keep later ones."""
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            sys.exit("stdin ended before the program did: the command has to pass its stdin on (docker: -i)")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(name: str, message: dict[str, Any], *parts: bytes) -> None:
    write(1, b"".join([f"{name} {json.dumps(message)}\n".encode(), *parts]))


def write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
