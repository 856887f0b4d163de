from __future__ import annotations

import ctypes
import os
import shutil
import sys
import threading
import time
import venv
from functools import partial
from pathlib import Path

import pytest
from denied_calls import LANDLOCK, MOUNT_SETATTR, UNSHARE, interpreter_denied
from test_command_sandbox import stand_in

from environments.errors import ConfigError, EnvironmentFailure
from environments.sandbox import local as sandbox
from environments.sandbox import process_tree
from environments.sandbox.base import Ending, SandboxLimits, clip
from environments.sandbox.child import PR_SET_PDEATHSIG
from environments.sandbox.local import BestEffortSandbox, LocalSandbox

MARK = "troupe-test-straggler"

PATIENT = SandboxLimits(timeout_seconds=60)
run_python = partial(BestEffortSandbox().run, limits=PATIENT)

ESCAPE = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        command = [sys.executable, "-c", "import time; time.sleep(60)", {MARK!r}]
        os.execve(sys.executable, command, environment)
    os._exit(0)
print("started")
time.sleep(seconds)
"""


def stragglers() -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if MARK.encode() in command.split(b"\0"):
                found.append(process.name)
    return found


def gone_within(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while stragglers() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not stragglers()


def directories(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir()]


REFUSED = {"without namespaces": UNSHARE, "without mount_setattr": MOUNT_SETATTR}


@pytest.fixture(params=["as the kernel allows", *REFUSED])
def kernel(request, tmp_path, monkeypatch):
    """Runs a test again on kernels that deny all namespaces, or are older than Linux 5.12."""
    if request.param in REFUSED:
        monkeypatch.setattr(sys, "executable", interpreter_denied(tmp_path, REFUSED[request.param]))
    return request.param


@pytest.fixture(params=["as the kernel allows", *REFUSED, pytest.param("container", marks=pytest.mark.slow)])
def run(request, tmp_path, monkeypatch):
    """Runs programs in each sandbox: in the local one on the same kernels, and in a container."""
    if request.param == "container":
        monkeypatch.setenv("STAND_IN_STATE", str(tmp_path))
        return partial(stand_in().run, limits=PATIENT)
    if request.param in REFUSED:
        monkeypatch.setattr(sys, "executable", interpreter_denied(tmp_path, REFUSED[request.param]))
    return run_python


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where the sandbox makes its directories."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_output_errors_and_value_come_back(run):
    result = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[1, 'a']")
    assert (result.stdout, result.stderr, result.value) == ("out\n", "err\n", "[1, 'a']")
    assert (result.ending, result.exit_code, result.succeeded) == (Ending.EXITED, 0, True)


@pytest.mark.parametrize(
    ("source", "value"), [("1 + 1", "2"), ("x = 3", None), ("print()", None), ("", None), ("# nothing", None)]
)
def test_value_is_that_of_a_last_expression(source, value):
    assert run_python(source).value == value


def test_program_reads_its_input_and_is_main():
    source = "def f():\n    print(input()[::-1])\nif __name__ == '__main__':\n    f()\n"
    assert run_python(source, stdin="abc\n").stdout == "cba\n"


def test_installed_packages_can_be_imported():
    assert run_python("import numpy\nint(numpy.arange(4).sum())").value == "6"


def test_traceback_shows_program_and_nothing_of_sandbox(run):
    result = run("def f():\n    return 1 / 0\nf()")
    lines = result.stderr.splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        '  File "main.py", line 3, in <module>',
        "    f()",
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "sandbox" not in result.stderr
    assert (result.exit_code, result.ending) == (1, Ending.EXITED)


@pytest.mark.parametrize("source", ["x = (", "a\0b", "(" * 10_000, "'\ud800'"])
def test_source_that_is_no_python_is_an_error_of_the_program(source):
    result = run_python(source)
    assert result.ending is Ending.EXITED
    assert ("child.py" in result.stderr, "Traceback" in result.stderr) == (False, False)


def test_exit_code_is_told(run):
    assert run("import sys\nsys.exit(3)").exit_code == 3


@pytest.mark.slow
def test_what_was_printed_before_a_time_out_is_kept(kernel):
    begin = time.monotonic()
    result = run_python("print('before')\nwhile True: pass", limits=SandboxLimits(timeout_seconds=2))
    assert (result.stdout, result.ending, result.exit_code) == ("before\n", Ending.TIMED_OUT, None)
    assert result.timed_out
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_cpu_limit_ends_a_program_too():
    result = run_python("while True: pass", limits=SandboxLimits(timeout_seconds=120, cpu_seconds=1))
    assert result.timed_out


@pytest.mark.slow
def test_program_that_takes_too_much_memory_is_told_apart(run):
    limits = SandboxLimits(memory_bytes=200 << 20)
    result = run("blocks = []\nwhile True:\n    blocks.append(bytearray(1 << 20))", limits=limits)
    assert result.ending is Ending.OUT_OF_MEMORY
    assert result.stderr.rstrip().endswith("MemoryError")


def test_crash_is_told_apart(run):
    result = run("import ctypes\nctypes.string_at(0)")
    assert (result.ending, result.exit_code) == (Ending.KILLED, -11)


@pytest.mark.slow
def test_printing_without_end_neither_hangs_nor_fills_memory(run):
    limits = SandboxLimits(timeout_seconds=20, file_bytes=1 << 20, output_bytes=1000)
    result = run("import itertools\nfor i in itertools.count(): print(i)", limits=limits)
    assert result.stdout.startswith("0\n1\n")
    assert "bytes cut" in result.stdout
    assert len(result.stdout) < 1100
    assert "File too large" in result.stderr


def test_no_variable_of_the_parent_is_seen(kernel, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    result = run_python("import os\nassert os.environ['HOME'] == os.getcwd()\nprint(os.environ)")
    assert "secret" not in result.stdout
    assert result.succeeded, result.stderr


@pytest.mark.slow
def test_files_of_a_program_are_gone_afterwards(kernel, scratch):
    deep = (
        "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()\n'made'"
    )
    assert run_python(deep).value == "'made'"
    assert directories(scratch) == []


def test_open_files_are_limited(kernel):
    source = "files = []\nwhile True: files.append(open('/dev/null'))"
    assert "Too many open files" in run_python(source).stderr


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 30])
@pytest.mark.parametrize("environment", ["os.environ", "{}"])
def test_processes_that_left_the_session_are_killed(kernel, seconds, environment):
    limits = SandboxLimits(timeout_seconds=3 if seconds else 15)
    begin = time.monotonic()
    source = f"import os\nseconds, environment = {seconds}, {environment}\n{ESCAPE}"
    result = run_python(source, limits=limits)
    assert (result.stdout, result.timed_out) == ("started\n", seconds == 30)
    assert gone_within(25)
    assert time.monotonic() - begin < 29


@pytest.mark.slow
def test_program_that_leaves_its_supervisor_itself_is_killed_too(kernel):
    command = ["-c", "import time; time.sleep(300)", MARK]
    source = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 0)
os.execv(sys.executable, [sys.executable, *{command}])
"""
    assert run_python(source, limits=SandboxLimits(timeout_seconds=1.5)).timed_out
    assert gone_within(60)


@pytest.mark.slow
def test_program_that_stops_its_group_ends_in_time():
    begin = time.monotonic()
    result = run_python("import os\nos.kill(0, 19)", limits=SandboxLimits(timeout_seconds=1))
    assert result.ending in (Ending.TIMED_OUT, Ending.KILLED)
    assert time.monotonic() - begin < process_tree.KILL_SECONDS


def test_program_cannot_end_its_supervisor_unnoticed(kernel):
    result = run_python("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.2)\n'alive'")
    # Isolated, its parent is the first process of the namespace, which gets no signal from within. Else
    # landlock denies the signal, or the end of the supervisor ends it.
    assert result.ending in (Ending.EXITED, Ending.KILLED)


def test_isolation_keeps_network_files_and_processes_away(tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("here")
    source = f"""
import json, os, socket
open("mine", "w").write("allowed")
open("/dev/null", "w").write("allowed")
done = []
for name, action in {{
    "network": lambda: socket.create_connection(("127.0.0.1", 1), 1),
    "read": lambda: open({str(canary)!r}),
    "write": lambda: open({str(canary)!r}, "w"),
    "change": lambda: open(json.__file__, "a"),
    "create": lambda: open("/tmp/created", "w"),
    "delete": lambda: os.remove({str(canary)!r}),
    "environ": lambda: open("/proc/{os.getpid()}/environ").read(),
    "kill": lambda: os.kill({os.getpid()}, 0),
}}.items():
    try:
        action()
        done.append(name)
    except ConnectionRefusedError:
        done.append(name)
    except OSError:
        pass
done
"""
    result = run_python(source)
    if not result.isolated:
        pytest.skip("this kernel allows no user namespaces")
    assert (result.value, result.stderr) == ("[]", "")
    assert canary.read_text() == "here"


def test_no_file_of_the_user_can_be_read(tmp_path, monkeypatch, scratch):
    (tmp_path / "train.jsonl").write_text("needle")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    repository = Path(__file__).parents[3]
    away = [tmp_path / "train.jsonl", repository / "README.md", Path.home() / ".bashrc"]
    away += map(Path, ("/etc/shadow", "/var", "/run", "/root/.bashrc", "/dev/shm", "/sys/fs"))
    source = f"""
import os
processes = [name for name in os.listdir("/proc") if name.isdecimal()]
[path for path in {list(map(str, away))} if os.path.exists(path)], processes, os.listdir({str(scratch)!r})
"""
    result = run_python(source)
    if not result.isolated:
        pytest.skip("this kernel allows no user namespaces")
    assert result.stderr == ""
    seen, processes, directories = eval(result.value)
    assert (seen, processes, len(directories)) == ([], ["1", "2"], 1)


def test_packages_of_an_environment_in_home_alone_are_seen(tmp_path, monkeypatch):
    home = tmp_path / "linked"
    (tmp_path / "home").mkdir()
    home.symlink_to(tmp_path / "home")
    venv.create(home / "venv", symlinks=True)
    packages = home / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "only_here.py").write_text("value = 7")
    (home / "secret").write_text("needle")
    monkeypatch.setattr(sys, "executable", str(home / "venv/bin/python"))
    source = f"""
import glob, only_here, subprocess, sys
command = [sys.executable, "-c", "import decimal, only_here; print(only_here.value)"]
child = subprocess.run(command, capture_output=True, text=True)
only_here.value, child.stdout + child.stderr, sorted(glob.glob({str(home)!r} + "/*"))
"""
    result = run_python(source)
    if not result.isolated:
        pytest.skip("this kernel allows no user namespaces")
    assert result.stderr == ""
    assert result.value == repr((7, "7\n", [str(home / "venv")]))


def test_container_that_masks_proc_still_isolates(tmp_path, monkeypatch):
    source = Path(sandbox.__file__).with_name("child.py").read_text()
    fresh = 'mount("proc", f"{root}/proc", "proc"'
    assert fresh in source
    child = tmp_path / "child.py"
    child.write_text(source.replace(fresh, 'mount("proc", f"{root}/proc", "no such file system"'))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    result = run_python("open('/dev/stdin').read()", stdin="read")
    assert result.value == "'read'"
    assert result.isolated is run_python("1").isolated


def test_missing_isolation_is_told(kernel, caplog):
    sandbox.warn_of_no_isolation.cache_clear()
    result = run_python("1")
    if kernel in REFUSED:
        assert not result.isolated
    assert ("user namespaces" in caplog.text) is not result.isolated


@pytest.mark.slow
def test_memory_is_limited_for_all_processes_together(kernel):
    source = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(os.urandom(1 << 20)) * 60
        time.sleep(100)
        os._exit(0)
time.sleep(100)
"""
    limits = SandboxLimits(timeout_seconds=60, memory_bytes=200 << 20)
    assert run_python(source, limits=limits).ending is Ending.OUT_OF_MEMORY


FILLED = """
import ctypes, mmap, os, time
kept = []
for number in range(24):  # of 10 MB each
    descriptor = os.memfd_create("kept")
    os.write(descriptor, bytes(10 << 20))
    kept.append(descriptor)
"""
SHARES_MEMORY = {
    "open": f"{FILLED}\ntime.sleep(100)",
    "mapped, and closed": """
import mmap, os, time
for process in range(3):
    for number in range(8):
        descriptor = os.memfd_create("kept")
        os.write(descriptor, bytes(10 << 20))
        kept = [kept, mmap.mmap(descriptor, 10 << 20)] if number else [mmap.mmap(descriptor, 10 << 20)]
        os.close(descriptor)
    if os.fork():
        time.sleep(100)
time.sleep(100)
""",
    "anonymous": """
import mmap, os, time
for process in range(3):
    shared = mmap.mmap(-1, 80 << 20)
    shared.write(bytes(1 << 20) * 80)
    if os.fork():
        time.sleep(100)
time.sleep(100)
""",
}
SEGMENTS = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for process in range(3):
    place = libc.shmat(libc.shmget(0, 80 << 20, 0o1600), None, 0)
    ctypes.memset(place, 1, 80 << 20)
    if os.fork():
        time.sleep(100)
    libc.shmdt(ctypes.c_void_p(place))
time.sleep(100)
"""
MOST_MEMORY = SandboxLimits(timeout_seconds=60, memory_bytes=200 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("source", SHARES_MEMORY.values(), ids=SHARES_MEMORY)
def test_shared_memory_counts(source, kernel):
    assert run_python(source, limits=MOST_MEMORY).ending is Ending.OUT_OF_MEMORY


@pytest.mark.slow
def test_segments_of_system_v_count_where_they_are_allowed():
    result = run_python(SEGMENTS, limits=MOST_MEMORY)
    if not result.isolated:
        pytest.skip("this kernel allows no user namespaces")
    assert result.ending is Ending.OUT_OF_MEMORY


@pytest.mark.slow
def test_memory_that_processes_share_counts_once(kernel):
    source = (
        FILLED.replace("range(24)", "range(8)")
        + """
shared = mmap.mmap(kept[0], 10 << 20)
assert shared[:] == bytes(10 << 20)
private = bytearray(os.urandom(1 << 20)) * 50
processes = [os.fork() for _ in range(3)]
time.sleep(1)
"""
    )
    assert run_python(source, limits=MOST_MEMORY).ending is Ending.EXITED


@pytest.mark.slow
def test_cpu_time_is_limited_for_all_processes_together(kernel):
    source = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        break
told = 0.0
while True:
    if time.process_time() > told + 0.1:
        told = time.process_time()
        os.write(1, f"{os.getpid()} {told}\\n".encode())
"""
    result = run_python(source, limits=SandboxLimits(timeout_seconds=120, cpu_seconds=4))
    assert result.ending is Ending.TIMED_OUT
    used = {pid: float(seconds) for pid, seconds in map(str.split, result.stdout.splitlines())}
    assert len(used) == 5
    # The kernel's own limit, four seconds for one process, would let the five of them use 20.
    assert 3 < sum(used.values()) < 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "for n in range(20_000): open(str(n), 'w').close()\ntime.sleep(100)",
        "for n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(100)",
        "for n in range(3000): os.mkdir('d'); os.chdir('d')\ntime.sleep(100)",
        "os.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0)\ntime.sleep(100)",
    ],
    ids=["many files", "large files", "nested beyond the longest path", "a folder that cannot be read"],
)
def test_files_are_limited_together_without_a_file_system(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter_denied(tmp_path, UNSHARE))
    if "chmod" in source and os.getuid() == 0:
        pytest.skip("root reads all folders, so none is hidden from its count")
    limits = SandboxLimits(timeout_seconds=60, file_bytes=16 << 20)
    assert run_python(f"import os, time\n{source}", limits=limits).ending is Ending.KILLED


def test_isolated_program_makes_a_limited_number_of_files():
    result = run_python("for n in range(20_000): open(str(n), 'w').close()")
    if not result.isolated:
        pytest.skip("this kernel allows no user namespaces")
    assert "No space left on device" in result.stderr


BOMBS = {
    "sleeping": "for _ in range(9): os.fork()\ntime.sleep(60)",
    "busy": "for _ in range(8): os.fork()\nwhile True: pass",
    "each in a session": "for _ in range(8): os.fork() or os.setsid()\nwhile True: pass",
    "sharing much": "block = bytearray(400 << 20)\nfor _ in range(8): os.fork()\nwhile True: pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_fork_bomb_ends_at_its_time_limit(source, kernel):
    start = "import os, sys, time\nsys.stderr = open('/dev/null', 'w')\n"
    begin = time.monotonic()
    result = run_python(f"{start}{source}", limits=SandboxLimits(timeout_seconds=2))
    assert result.ending is not Ending.KILLED
    # The limit, the start, and the end of hundreds of processes that keep the machine busy: 12 s at times.
    assert time.monotonic() - begin < 30


def test_many_threads_run_programs_at_once(run):
    results: dict[int, str | None] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: run(f"{n} * 2").value})) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {n: str(n * 2) for n in range(8)}


def test_no_descriptor_is_left_open(scratch):
    run_python("1")
    before = len(os.listdir("/proc/self/fd"))
    run_python("1")
    run_python("while True: pass", limits=SandboxLimits(timeout_seconds=0.1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_interpreter_that_does_not_start_is_environment_failure(monkeypatch, scratch):
    monkeypatch.setattr(sandbox, "_CHILD", "/nonexistent.py")
    with pytest.raises(EnvironmentFailure, match=r"did not start.*nonexistent"):
        run_python("1")
    assert directories(scratch) == []


def test_missing_interpreter_leaves_nothing_behind(monkeypatch, scratch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with pytest.raises(EnvironmentFailure, match="cannot start /nonexistent"):
        run_python("1")
    assert (directories(scratch), len(os.listdir("/proc/self/fd"))) == ([], before)


@pytest.mark.parametrize(
    "limits", [{"timeout_seconds": 0}, {"memory_bytes": -1}, {"timeout_seconds": float("inf")}]
)
def test_impossible_limits_are_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        SandboxLimits(**limits)


def test_clip_keeps_the_beginning_and_the_end():
    assert clip("abc", 3) == "abc"
    assert clip("a" * 10 + "b" * 10, 4) == "aa\n[... 16 characters cut ...]\nbb"


@pytest.mark.parametrize("denied", REFUSED.values())
def test_isolation_required_and_denied_is_an_error_with_a_remedy(denied, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter_denied(tmp_path, denied))
    with pytest.raises(EnvironmentFailure, match=r"no user namespaces .*Allow them: .*'best-effort'"):
        LocalSandbox().run("raise SystemExit(3)")
    with pytest.raises(EnvironmentFailure, match="no user namespaces"):
        BestEffortSandbox(folders=("/app",)).run("raise SystemExit(3)")


def test_files_stay_out_of_reach_without_namespaces(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter_denied(tmp_path, UNSHARE))
    canary = tmp_path / "canary"
    canary.write_text("here")
    source = f"""
import os, socket
open("mine", "w").write("allowed")
open("/dev/null", "w").write("allowed")
done = []
for name, action in {{
    "network": lambda: socket.socket(),
    "read": lambda: open({str(canary)!r}).read(),
    "write": lambda: open({str(canary)!r}, "w"),
    "create": lambda: open({str(tmp_path / "new")!r}, "w"),
    "delete": lambda: os.remove({str(canary)!r}),
    "shadow": lambda: open("/etc/shadow").read(),
    "environ": lambda: open("/proc/{os.getpid()}/environ").read(),
    "memory": lambda: open("/proc/{os.getpid()}/mem", "rb"),
    "parent": lambda: open(f"/proc/{{os.getppid()}}/fd/0"),
    "kill": lambda: os.kill({os.getpid()}, 0),
    "kill parent": lambda: os.kill(os.getppid(), 0),
}}.items():
    try:
        action()
        done.append(name)
    except OSError:
        pass
done
"""
    if not has_landlock():
        pytest.skip("this kernel has no landlock")
    result = run_python(source)
    assert (result.isolated, result.value, result.stderr) == (False, "[]", "")
    assert canary.read_text() == "here"


SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(SYSTEM_PYTHON is None, reason="no Python lies where other users can read it")
def test_root_hands_programs_to_a_user_without_namespaces(tmp_path, monkeypatch):
    # Neither namespaces nor landlock: nothing but the user keeps this program in.
    monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    monkeypatch.setattr(sys, "executable", interpreter_denied(tmp_path, UNSHARE, *LANDLOCK))
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    source = f"""
import os
open("mine", "w").write("allowed")
os.listdir("/proc/self/fd")
done = []
for name, action in {{
    "shadow": lambda: open("/etc/shadow").read(),
    "environ": lambda: open("/proc/{os.getpid()}/environ").read(),
    "kill": lambda: os.kill({os.getpid()}, 0),
    "kill parent": lambda: os.kill(os.getppid(), 0),
    "root again": lambda: os.setuid(0),
}}.items():
    try:
        action()
        done.append(name)
    except OSError:
        pass
done, os.getuid() >= 2_000_000_000, os.getgroups()
"""
    results = [run_python(source), run_python("import os, time\nif os.fork(): os._exit(0)\ntime.sleep(60)")]
    assert (results[0].value, results[0].stderr) == ("([], True, [])", "")
    assert results[1].ending is Ending.EXITED  # and whatever a program of another user left behind is killed


def has_landlock() -> bool:
    """Whether landlock keeps signals in, which it does from its version 6."""
    return ctypes.CDLL(None).syscall(LANDLOCK[0], None, 0, 1) >= 6


def test_best_effort_is_announced_by_who_chooses_it(caplog):
    sandbox.announce_best_effort.cache_clear()
    LocalSandbox()
    assert caplog.text == ""
    LocalSandbox(isolation="best-effort")
    assert "may forge their rewards" in caplog.text


def test_unknown_isolation_is_a_config_error():
    with pytest.raises(ConfigError, match="isolation='none' is unknown"):
        LocalSandbox(isolation="none")


CARRY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
kept = {
    "segment": libc.shmget(0x74726f75, 4096, flags),
    "semaphore": libc.semget(0x74726f75, 1, flags),
    "queue": libc.msgget(0x74726f75, flags),
    "POSIX queue": libc.mq_open(b"/troupe-test", 0o102 if flags & 0o1000 else 0o2, 0o600, None),
}
if flags & 0o1000:
    for ring in (-3, -4, -5):  # of the session, of the user, of the user's session
        kept[f"key {ring}"] = libc.syscall(248, b"user", b"troupe-test", b"x", 1, ring)
for ring in (-3, -4, -5):
    kept[f"search {ring}"] = libc.syscall(250, 10, ring, b"user", b"troupe-test", 0)
[name for name, number in kept.items() if number >= 0]
"""


@pytest.mark.slow
def test_nothing_in_kernel_is_carried_from_one_program_to_next(kernel):
    makes, looks = (run_python(f"flags = {flags}\n{CARRY}") for flags in (0o1600, 0))
    assert (makes.ending, looks.value, looks.stderr) == (Ending.EXITED, "[]", "")
    if not makes.isolated:
        assert makes.value == "[]"


def test_error_before_program_begins_is_environment_failure(kernel, tmp_path, monkeypatch):
    folder = Path(sandbox.__file__).parent
    for name in ("child.py", "restrictions.py"):
        shutil.copy(folder / name, tmp_path / name)
    child = tmp_path / "child.py"
    child.write_text(child.read_text().replace("        set_limits(settings)", "        settings['missing']"))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(EnvironmentFailure, match=r"(?s)did not start.*KeyError: 'missing'"):
        run_python("1")


def test_program_cannot_change_the_memory_of_its_parent() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if os.fork():
    os.wait()
else:
    print(libc.ptrace(16, os.getppid(), 0, 0), libc.process_vm_writev(os.getppid(), None, 0, None, 0, 0))
"""
    assert LocalSandbox().run(source).stdout == "-1 -1\n"
