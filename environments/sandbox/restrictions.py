"""The restrictions of a program where the kernel denies namespaces. Used by ``child``.

Landlock asks for no rights: a process lays it on itself, and on all that it starts. Root can become another
user besides. Only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH, CREATE_RULESET_VERSION = 1, 1
# From linux/landlock.h. The kernel's version says how many of its file accesses it knows.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ACCESSES_OF_VERSIONS = (13, 14, 15, 15, 16)
TRUNCATE = 1 << 14
NETWORK_VERSION, SCOPE_VERSION = 4, 6
BIND_AND_CONNECT = ABSTRACT_SOCKETS_AND_SIGNALS = 3
PR_SET_DUMPABLE = 4  # from sys/prctl.h
FIRST_USER = 2_000_000_000  # beyond the users that systems and containers hand out

libc = ctypes.CDLL(None, use_errno=True)


def leave_root(directory: str, most_processes: int) -> bool:
    """Become a user that owns nothing but ``directory``; say whether this was possible.

    It needs the rights of root, and packages and a ``directory`` that lie where others can read. The user is
    this process's alone, so the kernel counts no processes but the program's. Forgets ``die_with_parent``.
    """
    if os.getuid() != 0:
        return False
    user = FIRST_USER + os.getpid()
    needed = [directory, *filter(os.path.isdir, sys.path)]
    try:
        os.setgroups([])
        os.chown(directory, user, user)
        os.setegid(user)
        os.seteuid(user)
    except PermissionError:  # a root without these rights, as in a container that drops them
        return False
    seen = all(os.access(path, os.R_OK | os.X_OK, effective_ids=True) for path in needed)
    os.seteuid(0)
    if not seen:
        os.setegid(0)
        os.chown(directory, 0, 0)
        return False
    resource.setrlimit(resource.RLIMIT_NPROC, (most_processes, most_processes))
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc belongs to root
    return True


def keep_files(directory: str, readable: list[str], writable: list[str]) -> None:
    """Let this process write to ``directory`` alone, and read ``readable`` alone; nor has it TCP.

    ``writable`` are devices. It can then neither signal nor look into a process that is not restricted with
    it. What the kernel does not have is left out. The process has to have given up new rights before.
    """
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    if version < 1:
        return
    accesses = (1 << ACCESSES_OF_VERSIONS[min(version, len(ACCESSES_OF_VERSIONS)) - 1]) - 1
    handled = [accesses]
    if version >= NETWORK_VERSION:
        handled.append(BIND_AND_CONNECT)
    if version >= SCOPE_VERSION:
        handled.append(ABSTRACT_SOCKETS_AND_SIGNALS)
    packed = struct.pack(f"{len(handled)}Q", *handled)
    ruleset = checked(libc.syscall(LANDLOCK_CREATE_RULESET, packed, len(packed), 0))
    allowed = dict.fromkeys(readable, EXECUTE | READ_FILE | READ_DIR)
    allowed |= dict.fromkeys(writable, READ_FILE | WRITE_FILE | TRUNCATE) | {directory: accesses}
    for path, access in allowed.items():
        if not os.path.isdir(path):
            access &= EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & accesses, descriptor)
        checked(libc.syscall(LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0))
        os.close(descriptor)
    checked(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def checked(result: int) -> int:
    """The result of a call.

    Raises:
        OSError: it failed.
    """
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
