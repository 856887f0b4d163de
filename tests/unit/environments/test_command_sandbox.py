"""Programs in containers, which are started by a stand-in: no container engine runs where the tests do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from environments.errors import ConfigError, EnvironmentFailure
from environments.rewards import code_reward_fn
from environments.sandbox import command
from environments.sandbox.base import Ending, SandboxLimits
from environments.sandbox.command import CommandSandbox
from environments.tools.python import PythonTool

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).parents[2] / "container_stand_in.py"
ENGINE = (sys.executable, str(STAND_IN))
OPTIONS = ("--rm", "-i", "--name={name}", "--network=none", "--memory={memory_bytes}")
STUBBORN = "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(60)"
"""A program that stops the process that would report its end."""


def stand_in(image: str = "python", **settings: object) -> CommandSandbox:
    command = (*ENGINE, "run", *OPTIONS, image, sys.executable)
    return replace(CommandSandbox(command, stop=(*ENGINE, "kill", "{name}")), **settings)


@pytest.fixture(autouse=True)
def engine(tmp_path, monkeypatch):
    """The engine's folder. At the end of a test, no container is left."""
    folder = tmp_path / "engine"
    folder.mkdir()
    monkeypatch.setenv("STAND_IN_STATE", str(folder))
    yield folder
    assert containers(folder) == []


def containers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_file() and path.name != "calls"]


def calls(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def test_command_gets_the_limits_and_a_name_of_its_own(engine):
    for _ in range(2):
        result = stand_in().run("1", limits=SandboxLimits(memory_bytes=123 << 20))
        assert result.isolated is None, "that is up to the engine"
    first, second = (call for call in calls(engine) if call[0] == "run")
    assert first[1:6] == ["--rm", "-i", first[3], "--network=none", f"--memory={123 << 20}"]
    assert first[3].startswith("--name=troupe-")
    assert first[3] != second[3]


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
def test_stdin_is_a_file_of_any_size_that_can_be_read_twice(size):
    source = "import sys\nfirst = sys.stdin.read()\nsys.stdin.seek(0)\nlen(first), first == sys.stdin.read()"
    assert stand_in().run(source, stdin="x" * size).value == repr((size, True))


def test_program_finds_its_stdin_in_no_memory_of_its_own():
    """The rewards for code rely on it: tests that a solution could find would be no tests."""
    source = """
import re
found = []
for line in open("/proc/self/maps"):
    (begin, _, end), access = line.split()[0].partition("-"), line.split()[1]
    if "rw" in access:
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(int(begin, 16))
            found += re.findall(rb"needle-[0-9]{20}", memory.read(int(end, 16) - int(begin, 16)))
len(found), len(re.findall("needle-[0-9]{20}", input()))
"""
    result = stand_in().run(source, stdin=f"needle-{12345:020} " * 1000)
    assert (result.value, result.stderr) == ("(0, 1000)", "")


def test_greeting_of_the_image_is_not_taken_for_output():
    assert stand_in("banner").run("print('mine')").stdout == "mine\n"


def test_timeout_keeps_the_output_and_ends_what_was_started(engine):
    source = "import os\nprint('before', flush=True)\nos.fork()\nwhile True: pass"
    result = stand_in().run(source, limits=SandboxLimits(timeout_seconds=4))
    assert (result.stdout, result.ending, result.exit_code) == ("before\n", Ending.TIMED_OUT, None)
    assert [call[0] for call in calls(engine)] == ["run"]  # the container ended by itself


def test_container_that_does_not_answer_is_stopped_by_name(engine):
    begin = time.monotonic()
    result = stand_in(reply_seconds=1.0).run(STUBBORN, limits=SandboxLimits(timeout_seconds=2))
    assert (result.stdout, result.ending) == ("", Ending.TIMED_OUT)
    run, kill = calls(engine)
    assert run[3] == f"--name={kill[1]}"
    assert time.monotonic() - begin < 30


def test_container_whose_client_died_is_stopped_by_name(engine):
    source = "import time\ntime.sleep(60)"
    with pytest.raises(EnvironmentFailure, match="exit status -9 before it started a program"):
        stand_in("dies").run(source)
    assert [call[0] for call in calls(engine)] == ["run", "kill"]


def test_error_before_program_begins_is_environment_failure(engine, monkeypatch):
    source = command._interpreter_source()
    broken = source.replace("child.set_limits(request)", "child.missing(request)")
    assert broken != source
    monkeypatch.setattr(command, "_interpreter_source", lambda: broken)
    with pytest.raises(EnvironmentFailure, match=r"before it started a program.*AttributeError: .*missing"):
        stand_in().run("1")


def test_without_a_stop_command_the_container_goes_on(engine):
    """The test that the stand-in is one: killing its client ends no container."""
    sandbox = stand_in(stop=(), reply_seconds=1.0)
    assert sandbox.run(STUBBORN, limits=SandboxLimits(timeout_seconds=2)).timed_out
    (name,) = containers(engine)
    subprocess.run([*ENGINE, "kill", name], check=True)


def test_program_cannot_write_a_result_of_its_own():
    """It has no descriptor of the command's, and cannot open those of the process that has."""
    source = """
import os
opened = []
for process in (os.getppid(), os.getpid()):
    try:
        opened += [os.readlink(f"/proc/{process}/fd/{number}") for number in range(3)]
    except PermissionError:
        opened.append("denied")
opened
"""
    result = stand_in().run(source)
    files = [f"/memfd:{name} (deleted)" for name in ("in", "out", "err")]
    assert (result.value, result.stderr) == (repr(["denied", *files]), "")


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    stand_in().run("1")
    with pytest.raises(EnvironmentFailure):
        stand_in("no-engine").run("1")
    with pytest.raises(EnvironmentFailure):
        CommandSandbox(["/nonexistent"]).run("1")
    assert len(os.listdir("/proc/self/fd")) == before


# -- failures of the engine: never a low reward


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("no-engine", "exit status 125 before .*Cannot connect to the daemon.*Check that its daemon runs"),
        ("no-python", "exit status 127 before .*executable file not found"),
        ("hangs", "has not started Python within 2 s.*pull the image"),
    ],
)
def test_engine_that_fails_is_an_environment_failure(image, sentence):
    sandbox = stand_in(image, start_seconds=2.0 if image == "hangs" else 60.0)
    with pytest.raises(EnvironmentFailure, match=sentence) as failure:
        PythonTool(sandbox=sandbox)(code="1")
    assert str(STAND_IN) in str(failure.value)
    with pytest.raises(EnvironmentFailure, match=sentence):
        code_reward_fn({"tests": ["assert True"]}, "```python\npass\n```", sandbox=sandbox)


def test_command_that_does_not_exist_is_an_environment_failure():
    with pytest.raises(EnvironmentFailure, match=r"'/nonexistent run' cannot be started on .* Install it"):
        CommandSandbox(["/nonexistent", "run"]).run("1")


def test_stop_command_that_does_not_exist_is_environment_failure(engine):
    sandbox = stand_in(stop=("/nonexistent", "{name}"), reply_seconds=1.0)
    with pytest.raises(EnvironmentFailure, match=r"'/nonexistent troupe-.* cannot be started .*by hand"):
        sandbox.run(STUBBORN, limits=SandboxLimits(timeout_seconds=2))
    (name,) = containers(engine)
    subprocess.run([*ENGINE, "kill", name], check=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"command": []}, "command is empty"),
        ({"command": "docker run"}, "is a text"),
        ({"command": ["run", "{memory}"]}, "{memory_bytes}"),
        ({"command": ["run", "{"]}, "double a brace"),
        ({"command": ["run"], "stop": ["kill", "{name}"]}, "does not name its container"),
    ],
)
def test_wrong_template_is_a_config_error(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CommandSandbox(**settings)


def test_it_travels_to_other_processes():
    assert pickle.loads(pickle.dumps(stand_in())) == stand_in()


# -- the rewards for code


TASKS = {
    "stdin": {
        "tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10", "private": True}]
    },
    "call": {"tests": {"inputs": [[1, 2], [5, 5]], "outputs": [3, 10]}, "fn_name": "add"},
    "assert": {"tests": ["from solution import add\nassert add(1, 2) == 3", "assert add(5, 5) == 10"]},
}
ADD = "def add(a, b):\n    return {}\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"
ANSWERS = {
    "right": ADD.format("a + b"),
    "half right": ADD.format("a + b if a == 1 else 0"),
    "wrong": ADD.format("a * b * 7"),
    "raises": ADD.format("1 / 0"),
    "exits": ADD.format("__import__('os')._exit(0)"),
    "crashes": ADD.format("__import__('ctypes').string_at(0)"),
    "no Python": "def add(",
    "prints much": ADD.format("print('x' * 300_000) or a + b"),
    "kills its group": ADD.format("__import__('os').killpg(0, 9)"),
    "looks for the tests": ADD.format(
        "__import__('os').access('/proc/%d/fd/0' % __import__('os').getppid(), 4)"
    ),
}


@pytest.mark.parametrize("kind", TASKS)
def test_verdicts_are_those_of_the_local_sandbox(kind):
    for name, code in ANSWERS.items():
        answer = f"```python\n{code}\n```"
        local = code_reward_fn(TASKS[kind], answer)
        assert code_reward_fn(TASKS[kind], answer, sandbox=stand_in()) == local, name
        assert (local.reward == 1) is (name == "right" or (name == "prints much" and kind != "stdin")), name


def test_test_that_takes_too_long_fails_alone(monkeypatch):
    monkeypatch.setattr("environments.rewards.code.reward.TEST_SECONDS", 3.0)
    from environments.rewards.code.reward import CodeTest, run_tests

    tests = [CodeTest("call", "[1]", 1, "f"), CodeTest("call", "[0]", 0, "f")]
    code = "def f(n):\n    while n: pass\n    return n"
    first, second = run_tests(code, tests, test_seconds=3.0, sandbox=stand_in())
    assert first is not None
    assert first.error == "time limit of 3 s exceeded"
    assert second is None
