"""A Python interpreter to which the kernel denies some calls, as a container's default profile does.

``interpreter_denied`` writes a command that starts it. The command runs this file, which has the kernel
install a seccomp filter, and then becomes the real interpreter with the arguments that it was given.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import sys
from pathlib import Path

UNSHARE, MOUNT_SETATTR = 272, 442
LANDLOCK = (444, 445, 446)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, DENY_WITH_EPERM = 0x7FFF0000, 0x00050001


def interpreter_denied(folder: Path, *calls: int) -> str:
    """Write the command into ``folder`` and return its path."""
    command = folder / "python-denied"
    numbers = ",".join(map(str, calls))
    parts = [sys.executable, "-I", __file__, numbers, sys.executable]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(parts)} "$@"\n')
    command.chmod(0o755)
    return str(command)


def deny(calls: list[int]) -> None:
    """Have the kernel answer these calls of x86-64 with EPERM, in this process and all that it starts."""
    rules = [struct.pack("HBBI", LOAD_NUMBER, 0, 0, 0)]
    for place, call in enumerate(calls):
        rules.append(struct.pack("HBBI", JUMP_IF_EQUAL, len(calls) - place, 0, call))
    rules.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    rules.append(struct.pack("HBBI", RETURN, 0, 0, DENY_WITH_EPERM))
    program = ctypes.create_string_buffer(b"".join(rules))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    deny([int(call) for call in sys.argv[1].split(",")])
    os.execv(sys.argv[2], sys.argv[2:])
