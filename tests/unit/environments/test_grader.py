from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from environments.errors import EnvironmentFailure
from environments.sandbox.grader import Grader, GradingError
from environments.sandbox.local import LocalSandbox

NOTHING_LEFT_SECONDS = 60


@pytest.fixture
def grader():
    """Evaluates any Python expression: what a pure function may do to its process, it can be told to do."""
    grader = Grader("builtins:eval", imports=["os", "time"], memory_bytes=1 << 28)
    yield grader
    grader.close()


def run(grader, expression, seconds=30.0):
    return grader.call(expression, time_limit_seconds=seconds)


def pid_of(grader):
    return run(grader, "__import__('os').getpid()")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid):
    deadline = time.monotonic() + NOTHING_LEFT_SECONDS
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.slow
def test_call_returns_what_the_function_returns(grader):
    assert run(grader, "[1, {'a': None}, 'ä' * 3]") == [1, {"a": None}, "äää"]
    assert len(run(grader, "'x' * 1_000_000")) == 1_000_000
    assert run(grader, "'y'" + " " * 1_000_000) == "y"


@pytest.mark.slow
def test_one_child_serves_all_calls_and_is_another_process(grader):
    assert pid_of(grader) == pid_of(grader) != os.getpid()


def test_no_child_is_started_before_the_first_call():
    assert Grader("builtins:eval")._child is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang",
    [
        "__import__('time').sleep(60)",
        "__import__('math').factorial(10**8)",  # holds the interpreter lock: no other thread would run
        "__import__('os').kill(__import__('os').getpid(), 19)",  # SIGSTOP
    ],
)
def test_call_that_hangs_ends_and_the_next_has_a_fresh_child(grader, hang):
    before = pid_of(grader)
    start = time.monotonic()
    with pytest.raises(GradingError, match=r"could not be graded in 0\.3 s"):
        run(grader, hang, seconds=0.3)
    assert 0.3 <= time.monotonic() - start < 30
    assert gone(before)
    assert run(grader, "6 * 7") == 42


@pytest.mark.slow
def test_starting_is_not_on_the_time_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    grader = Grader("builtins:len", imports=["slow_to_import"])
    assert grader.call("abc", time_limit_seconds=3) == 3
    grader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "how"),
    [
        ("__import__('os')._exit(3)", "exit status 3"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "SIGKILL"),
        ("__import__('sys').exit(4)", "exit status 4"),
    ],
)
def test_child_that_dies_costs_its_call_alone(grader, death, how, monkeypatch):
    wait = subprocess.Popen.wait  # a tenth of a second is too short for an exit on a busy machine
    monkeypatch.setattr(subprocess.Popen, "wait", lambda process, seconds: wait(process, max(seconds, 60)))
    with pytest.raises(GradingError, match=f"died .{how}"):
        run(grader, death)
    assert run(grader, "6 * 7") == 42


@pytest.mark.slow
def test_child_that_dies_between_calls_costs_nothing(grader):
    os.kill(pid_of(grader), signal.SIGKILL)
    deadline = time.monotonic() + NOTHING_LEFT_SECONDS
    while grader._child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert run(grader, "6 * 7") == 42


@pytest.mark.slow
@pytest.mark.parametrize("greed", ["'x' * 10**12", "[bytearray(1 << 20) for _ in iter(int, 1)]"])
def test_memory_without_bound_is_refused(grader, greed):
    with pytest.raises(GradingError, match="MemoryError"):
        run(grader, greed)
    assert run(grader, "6 * 7") == 42


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "message"), [("1 / 0", "ZeroDivisionError"), ("{1}", "not JSON")])
def test_what_the_function_raises_is_said_and_the_child_stays(grader, expression, message):
    before = pid_of(grader)
    with pytest.raises(GradingError, match=message):
        run(grader, expression)
    assert pid_of(grader) == before


@pytest.mark.slow
def test_what_the_function_prints_disturbs_nothing(grader, capfd):
    assert run(grader, "print('hello') or 1") == 1
    assert capfd.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [{"function": "no_such_module:f"}, {"function": "builtins:len", "imports": ["no_such_module"]}]
)
def test_import_that_fails_fails_for_all_calls(order):
    with pytest.raises(EnvironmentFailure, match="no_such_module"):
        Grader(**order).call("abc", time_limit_seconds=30)


@pytest.mark.slow
def test_threads_take_turns_and_each_gets_its_own_result(grader):
    results = {}

    def work(number):
        results[number] = [run(grader, f"{number} * {factor}") for factor in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [number * factor for factor in range(20)] for number in range(8)}


@pytest.mark.slow
def test_child_outlives_the_thread_that_started_it(grader):
    pids = []
    thread = threading.Thread(target=lambda: pids.append(pid_of(grader)))
    thread.start()
    thread.join(60)
    assert pid_of(grader) == pids[0]


@pytest.mark.slow
def test_forked_process_gets_its_own_child(grader):
    ours = pid_of(grader)
    forked = os.fork()
    if forked == 0:
        theirs = pid_of(grader)
        grader.close()
        os._exit(0 if theirs != ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert pid_of(grader) == ours


PARENT = """
import sys
from environments.sandbox.grader import Grader
pid, state = "__import__('os').getpid()", sys.argv[1]
grader = Grader("builtins:eval")
sys.stdout.write(f"{grader.call(pid, time_limit_seconds=30)}\\n")
sys.stdout.flush()
if state == "idle":
    sys.stdin.read()
if state == "hang":
    grader.call("__import__('math').factorial(10**8)", time_limit_seconds=1.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["exit", "idle", "hang"])
def test_child_ends_with_its_parent(state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        child = int(parent.stdout.readline())
        if state != "exit":
            time.sleep(0.2)
            parent.kill()
    assert gone(child)


NONSENSE = """[
    __import__('os').write(int(each), b'\\0\\0\\0\\1x')
    for each in __import__('os').listdir('/proc/self/fd')
    if int(each) > 2 and 'socket' in __import__('os').path.realpath(f'/proc/self/fd/{each}')
]"""  # where the answer should stand


def descendants(pid):
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [each for child in children for each in (child, *descendants(child))]


@pytest.fixture
def confined():
    if not LocalSandbox().run("1").isolated:
        pytest.skip("this kernel allows no user namespaces")
    grader = Grader("builtins:eval", imports=["os", "socket", "time"], confined=True)
    yield grader
    grader.close()


def test_confined_child_reaches_no_file_network_or_process(confined, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("here")
    assert run(confined, f"__import__('os').system('rm {canary}; touch {tmp_path}/new') == 0") is False
    assert list(tmp_path.iterdir()) == [canary]
    assert run(confined, "__import__('os').getpid()") == 2  # of a process table of its own
    with pytest.raises(GradingError, match="unreachable"):
        run(confined, "__import__('socket').create_connection(('192.0.2.1', 80), 1)")
    own = "open(__import__('tempfile').gettempdir() + '/own', 'w').write('some libraries need it')"
    assert run(confined, own) == 22


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "seconds", "message"),
    [
        ("__import__('time').sleep(60)", 1, "could not be graded"),
        ("__import__('os')._exit(3)", 60, "exit status 3"),
        ("__import__('os').kill(2, 9)", 60, "exit status 137"),
        (NONSENSE, 60, "died"),
    ],
)
def test_confined_child_that_ends_costs_its_call_alone(confined, end, seconds, message):
    run(confined, "1")
    supervisor = confined._child._process.pid
    processes = [supervisor, *descendants(supervisor)]
    assert len(processes) == 3
    with pytest.raises(GradingError, match=message):
        run(confined, end, seconds)
    confined.close()
    assert all(map(gone, processes))
    assert run(confined, "6 * 7") == 42


def test_closing_leaves_no_process(grader):
    pid = pid_of(grader)
    grader.close()
    grader.close()
    assert not is_alive(pid)
