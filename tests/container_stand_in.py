"""A command that behaves like ``docker run`` and ``docker kill`` where no container engine runs.

``run --name=NAME [OPTION...] IMAGE COMMAND...`` starts COMMAND in a "container": a process in a session of
its own, which goes on if this client dies, as with a daemon. Its standard streams pass through pipes of the
client. ``kill NAME`` ends all processes of its session. The client's exit status is 125 where docker's is:
the engine fails. There is no isolation. ``$STAND_IN_STATE`` is the engine's folder: a file for each
container, with its session, and ``calls``, a line for each call. The image is one of:

python      nothing special
banner      prints a greeting to stdout first, as images of CUDA do
no-python   has no such program
no-engine   the daemon does not run
hangs       the daemon does not answer
dies        the client is killed while the container goes on
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

STATE = Path(os.environ["STAND_IN_STATE"])


def main() -> int:
    with (STATE / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:7]) + "\n")
    action, *arguments = sys.argv[1:]
    return run(arguments) if action == "run" else kill(arguments[-1])


def run(arguments: list[str]) -> int:
    options = list(itertools.takewhile(lambda part: part.startswith("-"), arguments))
    image, *command = arguments[len(options) :]
    name = next(part.removeprefix("--name=") for part in options if part.startswith("--name="))
    if image == "no-engine":
        print("Cannot connect to the daemon. Is it running?", file=sys.stderr)
        return 125
    if image == "hangs":
        time.sleep(600)
    if image == "no-python":
        print('exec: "python": executable file not found in $PATH', file=sys.stderr)
        return 127
    if image == "banner":
        print("==========\n== CUDA ==\n==========", flush=True)
    scratch = STATE / f"{name}.tmp"
    scratch.mkdir()
    container = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(scratch)},
    )
    (STATE / name).write_text(str(container.pid))
    threading.Thread(target=pass_on, args=(container,), daemon=True).start()
    while data := os.read(container.stdout.fileno(), 1000):
        if image == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        write(1, data)
    status = container.wait()
    kill(name)
    return status if status >= 0 else 128 - status


def pass_on(container: subprocess.Popen[bytes]) -> None:
    """In small pieces, as a daemon does."""
    with suppress(BrokenPipeError):
        while data := os.read(0, 1000):
            write(container.stdin.fileno(), data)
        container.stdin.close()


def write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def kill(name: str) -> int:
    """End all processes of a container."""
    try:
        session = int((STATE / name).read_text())
    except FileNotFoundError:
        print(f"No such container: {name}", file=sys.stderr)
        return 1
    while processes := [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if is_in(pid, session)
    ]:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with suppress(FileNotFoundError):
        (STATE / name).unlink()
    return 0


def is_in(pid: int, session: int) -> bool:
    """Whether a process belongs to the session and still runs."""
    try:
        state, _, _, its_session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(its_session) == session and state not in "ZX"


if __name__ == "__main__":
    sys.exit(main())
