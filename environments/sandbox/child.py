"""The inside of the local sandbox: shuts itself in, then runs a program. Started as a script by ``local``.

Two processes: the supervisor waits for its child, which runs the program. On the status pipe the child writes
``{"isolated": bool}`` when the program is about to start, and closes its end; the supervisor writes
``{"status": wait status, "cpu_seconds": float}`` when it ended, and is then killed. In namespaces the
supervisor is the first process, with which all others end, whatever they do; a third process, which ``local``
started, waits for it outside. ``enclose`` runs a command of the user's instead, for an ``EnclosedProgram``.

Only the standard library, and little of it: every import here delays every run. ``runner`` uses parts of
this module in containers.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import runpy
import signal
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any

PROGRAM_NAME = "main.py"
NOBODY = 65534
MAX_REPORT_BYTES = 16 << 20
MAX_PROCESSES = 301  # the least that the kernel takes
MAX_FILES = 10_000  # and folders
PID_MAX_OF_NAMESPACES = (6, 14)  # before this version of Linux, kernel.pid_max holds for the machine
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICES = [device for device in _HARMLESS if os.path.exists(device)]
STANDARD_STREAMS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}  # of /dev, in /proc/self

# All that a program in the sandbox sees of the machine, besides its packages: no home, no data, no secret.
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/sys/devices/system/cpu")
SYSTEM_SETTINGS = (  # of /etc, where secrets are too
    *("alternatives", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("mime.types", "nsswitch.conf", "passwd"),
)
PREFIX_PARTS = ("bin", "sbin", "include", "lib", "lib32", "lib64", "libexec", "share", "pyvenv.cfg")

# From linux/sched.h, sys/mount.h, linux/mount.h, sys/prctl.h and linux/capability.h.
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH, SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 2, 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
# From linux/seccomp.h, linux/audit.h and the tables of calls.
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT, FIRST_NUMBER_OF_X32 = 0, 4, 16, 0x40000000
AF_VSOCK = 40  # from linux/socket.h: of the machine, whatever the network namespace
ALLOW, DENY = 0x7FFF0000, 0x00050001  # the latter with EPERM
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
Calls = dict[str, tuple[int, ...]]
KEYS_AND_QUEUES: Calls = {  # which outlive a program, or take memory that is no process's: add_key,
    # request_key, keyctl; semget, semop, semctl, semtimedop; msgget, msgsnd, msgrcv, msgctl; mq_open,
    # mq_unlink
    "x86_64": (248, 249, 250, 64, 65, 66, 220, 68, 69, 70, 71, 240, 241),
    "aarch64": (217, 218, 219, 190, 193, 191, 192, 186, 189, 188, 187, 180, 181),
}
SEGMENTS: Calls = {"x86_64": (29, 30, 31), "aarch64": (194, 196, 195)}  # shmget, shmat, shmctl
TRACES: Calls = {"x86_64": (101, 311), "aarch64": (117, 271)}  # ptrace, process_vm_writev
RINGS: Calls = {"x86_64": (425,), "aarch64": (425,)}  # io_uring_setup: no filter sees what they call
SOCKETS: Calls = {"x86_64": (41,), "aarch64": (198,)}  # socket

SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # from linux/sockios.h and linux/if.h

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Be the supervisor; return only in the process of the program, after it."""
    settings = json.loads(sys.argv[1])
    if "command" in settings:
        enclose(**settings)
    status = settings["status_fd"]
    write("/proc/self/oom_score_adj", "1000")  # short of memory, the kernel shall end this, not a Ray actor
    apart = leave_namespaces()
    die_with_parent(settings["parent"])
    if apart:
        os.close(go_on_as_first_process())
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # all processes of the program stay below this one
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        os.setsid()  # so that it can be killed as a group, and without the supervisor
        die_with_parent(supervisor)
        isolated = apart and hide_files(settings["directory"], settings["file_bytes"], settings["folders"])
        if settings["isolation_required"] and not isolated:
            report(status, {"isolated": False})
            return
        os.chdir(settings["directory"])  # again: the new root covers the directory that we stood in
        if isolated:
            give_up_rights()
            deny_calls()
        else:
            restrict(settings["directory"], supervisor)
        set_limits(settings)
        with open(settings["program_fd"], encoding="utf-8") as file:
            source = file.read()
        report(status, {"isolated": isolated})
        os.close(status)
        run(source, settings["report_fd"])
        return
    _, wait_status, usage = os.wait4(program, 0)
    report(status, {"status": wait_status, "cpu_seconds": usage.ru_utime + usage.ru_stime})
    while True:  # until all processes below are found and killed, and this one last
        signal.pause()


def enclose(
    command: list[str], directory: str, visible: list[str], address: tuple[str, int], file_bytes: int
) -> None:
    """Run a command in namespaces of its own, and end as it does. Where the kernel denies them, end at once.

    It reaches nothing but ``address`` of its own loopback, whose listening socket goes out by stdin, to the
    process that answers there. It sees ``visible`` besides the system, and may write to ``directory`` alone,
    whose files stay.
    """
    write("/proc/self/oom_score_adj", "1000")
    if not leave_namespaces():
        sys.exit(1)
    die_with_parent(os.getppid())
    outside = go_on_as_first_process()
    program = os.fork()
    if program:
        ended = status = 0
        while ended != program:  # orphans end here too
            ended, status = os.wait()
        os.write(outside, str(status).encode())
        os._exit(0)
    os.setsid()
    die_with_parent(1)
    if not hide_files(directory, None, [], visible):
        sys.exit(1)
    os.chdir(directory)
    hand_out_listener(address)
    give_up_rights()
    deny_calls()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, file_bytes)
    os.execvp(command[0], command)


def hand_out_listener(address: tuple[str, int]) -> None:
    """Switch on the loopback device, listen there, and send the socket through stdin, which ends with it."""
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    with socket.socket(fileno=os.dup(0)) as owner, socket.create_server(tuple(address)) as listener:
        socket.send_fds(owner, [b"!"], [listener.fileno()])
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)


def end_as(status: int) -> None:
    """End in the way of another process, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:  # which nobody can handle
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def leave_namespaces() -> bool:
    """Leave the network and, for all further processes, the process table; say whether the kernel let us."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC) != 0:
        return False
    # Not root, not even of its own namespace: programs that it executes would get the capabilities back.
    write("/proc/self/setgroups", "deny")
    write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    write("/proc/self/uid_map", f"{NOBODY} {user} 1")
    return True


def go_on_as_first_process() -> int:
    """Go on in the first process of the new namespace. The program cannot end it, nor look into it.

    The kernel gives it no signal from within, and it keeps the capabilities that the program gives up. The
    process outside ends in the way of the wait status that is written to the descriptor that this returns.
    """
    reading, writing = os.pipe()
    first = os.fork()
    if first:
        os.close(writing)
        os.waitpid(first, 0)
        end_as(int(os.read(reading, 20) or signal.SIGKILL))
    os.close(reading)
    os.setsid()  # a signal of the program to its group would reach the process outside too
    die_with_parent(0)  # seen from a namespace, a process outside has no number
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with Python's own handler the program could send it
    return writing


def close_files(directory: str, file_bytes: int) -> bool:
    """Make all files and devices unwritable but ``directory``; say whether the kernel let us.

    ``directory`` becomes a file system in memory that ends with the last process in it. All others can be
    read, as a grader has to: its function may lie anywhere.
    """
    limit_processes()
    try:
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        for device in DEVICES:
            mount(device, device, None, MS_BIND)
        set_mount("/", AT_RECURSIVE, put=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
        for device in DEVICES:
            set_mount(device, 0, clear=MOUNT_ATTR_NODEV)
        mount_in_memory(directory, f"size={file_bytes},nr_inodes={MAX_FILES},mode=0700")
    except OSError:
        return False
    return True


def limit_processes() -> None:
    """Let no more than a few hundred processes run in this namespace, where it counts them by itself."""
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= PID_MAX_OF_NAMESPACES:
        write("/proc/sys/kernel/pid_max", str(MAX_PROCESSES))


def hide_files(
    directory: str, file_bytes: int | None, folders: list[str], visible: Sequence[str] = ()
) -> bool:
    """Leave nothing to be seen but the system, the installed packages, ``visible`` and ``directory``.

    The program may write to the latter: an empty one of ``file_bytes``, or with None what it has. All keep
    their paths below a new root, which is mounted on ``directory`` itself. Parts of ``directory`` are seen as
    the writable ``folders``, too. Say whether the kernel let us. Where a container masks parts of /proc, it
    forbids a fresh one: there the old one is seen.
    """
    limit_processes()
    write("/proc/sys/kernel/shm_rmid_forced", "1")  # else segments that nobody has attached keep memory
    root = directory
    own = os.open(directory, os.O_PATH)  # the new root will cover it
    try:
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        mount_in_memory(root, "mode=0755")
        for path in seen_paths(visible):
            make_place(root + path, os.path.isdir(path))
            mount(path, root + path, None, MS_BIND | MS_REC)
        for device in DEVICES:
            make_place(root + device, is_folder=False)
        for name, target in STANDARD_STREAMS.items():
            os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
        for folder in ("/proc", directory, *folders):
            make_place(root + folder, is_folder=True)
        set_mount(root, AT_RECURSIVE, put=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
        for device in DEVICES:
            mount(device, root + device, None, MS_BIND)
        try:
            mount("proc", f"{root}/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        except OSError:
            mount("/proc", f"{root}/proc", None, MS_BIND | MS_REC)
            set_mount(f"{root}/proc", AT_RECURSIVE, put=MOUNT_ATTR_RDONLY)
        if file_bytes is None:
            mount(f"/proc/self/fd/{own}", root + directory, None, MS_BIND)
            set_mount(root + directory, 0, put=MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
        else:
            mount_in_memory(root + directory, f"size={file_bytes},nr_inodes={MAX_FILES},mode=0700")
        for number, folder in enumerate(folders):
            part = f"{root}{directory}/.folders/{number}"
            os.makedirs(part)
            mount(part, root + folder, None, MS_BIND)
        os.chroot(root)  # without capabilities, nothing leads out of it
    except OSError:
        libc.umount2(os.fsencode(root), MNT_DETACH)
        return False
    finally:
        os.close(own)  # it would lead out
    return True


def seen_paths(more: Sequence[str] = ()) -> list[str]:
    """Paths of the system, of this interpreter's packages, and ``more``, without those inside another one."""
    own = (sys.prefix, sys.base_prefix)
    prefixes = dict.fromkeys(("/usr", "/usr/local", *own, *map(os.path.realpath, own)))
    paths = [os.path.join(prefix, part) for prefix in prefixes for part in PREFIX_PARTS]
    paths += [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    paths += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path)]
    paths += [*more, *SYSTEM_FOLDERS, *(f"/etc/{name}" for name in SYSTEM_SETTINGS)]
    seen: list[str] = []
    for path in sorted(map(os.path.normpath, paths)):  # an outer folder stands before its content
        within = any(path == other or path.startswith(f"{other}/") for other in seen)
        if path != "/" and not within and os.path.exists(path):
            seen.append(path)
    return seen


def make_place(path: str, is_folder: bool) -> None:
    """Make an empty folder or file to mount something on."""
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        open(path, "a", encoding="ascii").close()


def restrict(directory: str, supervisor: int) -> None:
    """Keep the program in by what is left without namespaces, see ``restrictions``."""
    restrictions = runpy.run_path(os.path.join(os.path.dirname(__file__), "restrictions.py"))
    if restrictions["leave_root"](directory, MAX_PROCESSES):
        die_with_parent(supervisor)
    give_up_rights()
    restrictions["keep_files"](directory, [*seen_paths(), "/proc"], DEVICES)
    deny_calls(SEGMENTS, SOCKETS)


def give_up_rights() -> None:
    """Drop all capabilities, for this process and all that it starts."""
    libc.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def deny_calls(*more: Calls) -> None:
    """Have seccomp deny what namespaces do not keep in, and ``more``, where it knows this kind of machine."""
    kind = os.uname().machine
    if kind not in MACHINES:
        return
    calls = [call for calls in (KEYS_AND_QUEUES, TRACES, RINGS, *more) for call in calls[kind]]
    deny = len(calls) + 6  # the place of the last rule, seen from the third
    rules = [(LOAD, 0, 0, MACHINE_AT), (JUMP_IF_EQUAL, 0, deny, MACHINES[kind]), (LOAD, 0, 0, NUMBER_AT)]
    rules.append((JUMP_IF_AT_LEAST, deny - 2, 0, FIRST_NUMBER_OF_X32))
    rules += [(JUMP_IF_EQUAL, deny - 3 - place, 0, call) for place, call in enumerate(calls)]
    rules += [(JUMP_IF_EQUAL, 0, 2, SOCKETS[kind][0]), (LOAD, 0, 0, ARGUMENTS_AT)]
    rules.append((JUMP_IF_EQUAL, 1, 0, AF_VSOCK))
    rules += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program)))
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0)


def set_limits(settings: dict[str, Any]) -> None:
    """Set the limits that hold for this process and all that it starts."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, settings["cpu_seconds"] + 1)
    limit(resource.RLIMIT_FSIZE, settings["file_bytes"])
    limit(resource.RLIMIT_NOFILE, settings["open_files"])
    limit(resource.RLIMIT_AS, settings["memory_bytes"])
    # A second earlier comes SIGXCPU, by which the program's end tells why: SIGKILL may have other reasons,
    # and the time that this process is said to have used is not the one that the kernel compares.
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(settings["cpu_seconds"], most), most))


def limit(kind: int, most: int) -> None:
    """Limit a resource of this process and of all that it starts; a lower limit that it has stays."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def run(source: str, report_fd: int) -> None:
    """Run ``source`` as ``__main__`` and report the value of its last statement, if that is an expression."""

    def show_error(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        import traceback

        if isinstance(error, MemoryError):
            traceback.clear_frames(trace)
            report(report_fd, {"error": "MemoryError"})
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    sys.excepthook = show_error
    sys.argv[:] = [PROGRAM_NAME]
    sys.path.insert(0, os.getcwd())
    for stream in (sys.stdout, sys.stderr):  # so that output before a time-out is kept
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    value = evaluate(source, module.__dict__)
    if value is not None:
        report(report_fd, {"value": repr(value)})


def evaluate(source: str, names: dict[str, Any]) -> Any:
    """Execute ``source``; return the value of its last statement, ``None`` if that is no expression."""
    import ast
    import linecache

    lines = source.splitlines(keepends=True)
    linecache.cache[PROGRAM_NAME] = (len(source), None, lines, PROGRAM_NAME)  # for tracebacks
    tree = compile(source, PROGRAM_NAME, "exec", ast.PyCF_ONLY_AST)  # ast.parse would stand in tracebacks
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        last = None
    exec(compile(ast.Module(tree.body[:-1] if last else tree.body, []), PROGRAM_NAME, "exec"), names)
    return eval(compile(ast.Expression(last.value), PROGRAM_NAME, "eval"), names) if last else None


def kept(descriptor: int, most: int) -> bytes:
    """The content of a file, of which at most ``most`` bytes are read: its beginning and its end."""
    size = os.fstat(descriptor).st_size
    if size <= most:
        return os.pread(descriptor, size, 0)
    half = most // 2
    begin, end = os.pread(descriptor, half, 0), os.pread(descriptor, half, size - half)
    return begin + f"\n[... {size - 2 * half} bytes cut ...]\n".encode() + end


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends; at once, if it is no longer ``parent``."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def report(descriptor: int, message: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def write(path: str, text: str) -> None:
    """Write ``text`` into a file of the kernel, where it lets us."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError:
        return


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    checked(libc.mount(*texts[:3], flags, texts[3]))


def mount_in_memory(target: str, options: str) -> None:
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, options)


def set_mount(target: str, scope: int, put: int = 0, clear: int = 0) -> None:
    attributes = struct.pack("4Q", put, clear, 0, 0)
    path = os.fsencode(target)
    checked(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, scope, attributes, len(attributes)))


def checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
