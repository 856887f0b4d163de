"""The inside of a shell's sandbox: lays out folders, runs one command in them, and packs them again.

``shell`` sends this text as a program of its own, with a request as JSON on stdin: ``{"trees": {folder:
packed files}, "kept": [folder], "variables", "cwd", "command", "seconds"}``. The value of its last statement
is the answer as JSON: ``{"trees", "cwd", "exit_code"}``. Only the standard library, of Python 3.10.12.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from contextlib import suppress

MAX_ANSWER_BYTES = 15 << 20  # less than MAX_REPORT_BYTES of ``child``
PR_SET_DUMPABLE = 4


class Answer(str):
    """A text that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def main() -> Answer:
    request = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no command can write the answer in its place
    for folder, tree in request["trees"].items():
        unpack(tree, folder)
    # The interpreter that runs this is the first ``python3`` of commands, too.
    path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
    variables = {**os.environ, "PATH": path}
    for name, value in request["variables"].items():
        variables[name] = value.replace("${PATH}", path).replace("$PATH", path)
    cwd, exit_code = execute(request["command"], request["cwd"], request["seconds"], variables)
    check_room(request["kept"])
    trees = {folder: pack([(folder, ".")]) for folder in request["kept"]}
    answer = json.dumps({"trees": trees, "cwd": cwd or request["cwd"], "exit_code": exit_code})
    if len(answer) > MAX_ANSWER_BYTES:
        sys.exit(f"the files take {len(answer) >> 20} MiB when packed, of which {MAX_ANSWER_BYTES >> 20} fit")
    return Answer(answer)


def execute(command: str, cwd: str, seconds: float, variables: dict[str, str]) -> tuple[str, int | None]:
    """Run a command; return the folder in which it ended, and its exit code, None where it had to be ended.

    What it has left running in its process group ends with it; all else ends with the sandbox.
    """
    place = os.memfd_create("cwd")
    script = f"trap 'pwd -P >&{place}' EXIT\ncd -- {shlex.quote(cwd)}\n{command}\n"
    process = subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        pass_fds=(place,),
        env=variables,
        start_new_session=True,
    )
    exit_code: int | None = None
    with suppress(subprocess.TimeoutExpired):
        exit_code = process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return os.pread(place, 4096, 0).decode("utf-8", "replace").rstrip("\n"), exit_code


def check_room(folders: list[str]) -> None:
    """End with a reason where the next command could not lay out the files, whose holes are filled then."""
    sizes = {}
    for folder in folders:
        for place, _, names in os.walk(folder):
            for status in (os.lstat(os.path.join(place, name)) for name in names):
                sizes[status.st_dev, status.st_ino] = status.st_size
        room = os.statvfs(folder)
        if sum(sizes.values()) > room.f_blocks * room.f_frsize:
            sys.exit(f"the files take {sum(sizes.values()) >> 20} MiB without holes, which do not fit")


def pack(files: list[tuple[str, str]]) -> str:
    """Files and whole folders under their names in an archive, as base64 of it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as archive:
        for path, name in files:
            archive.add(path, name, filter=lambda member: member.replace(uid=0, gid=0, uname="", gname=""))
    return base64.b64encode(data.getvalue()).decode("ascii")


def unpack(tree: str, folder: str) -> None:
    """Replace the content of a folder; no file can come to lie anywhere else."""
    os.makedirs(folder, exist_ok=True)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.unlink(entry)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(tree)), mode="r:gz") as archive:
        archive.extractall(folder, filter="tar")


main() if __name__ == "__main__" else None
