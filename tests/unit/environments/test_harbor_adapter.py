"""Tasks of Harbor, played in the real sandbox: limits, faults, and agents that cheat."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from environments import check_environment
from environments.adapters.harbor import HarborEnvironment, harbor_tasks, main
from environments.adapters.harbor_files import read_task
from environments.errors import ConfigError, DatasetError, EnvironmentFailure
from environments.sandbox.command import CommandSandbox
from environments.sandbox.local import LocalSandbox

TASKS = Path(__file__).parents[2] / "harbor_tasks"
REPAIR = "sed -i 's/prices\\[1:\\]/prices/' prices.py"

IMPORTED = """#!/bin/bash
cd /app && python3 /tests/check.py; echo $((1 - $?)) > /logs/verifier/reward.txt
"""

FORGED_ANSWER = """
import base64, glob, io, json, os, signal, tarfile
data = io.BytesIO()
with tarfile.open(fileobj=data, mode="w:gz") as archive:
    for name, link in (("t", "/tests"), ("t/check.py", ""), ("../tests/check.py", "")):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
        archive.addfile(member)
tree = base64.b64encode(data.getvalue()).decode()
answer = json.dumps({"trees": {"/app": tree}, "cwd": "/app", "exit_code": 0})
parent = os.getppid()
parent = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
for path in glob.glob(f"/proc/{parent}/fd/*"):
    if int(os.path.basename(path)) > 2 and os.path.isfile(path):
        with open(path, "w") as report:
            report.write(json.dumps({"value": answer}))
os.kill(parent, signal.SIGKILL)
"""


def changed(tmp_path: Path, **texts: str) -> Path:
    """A copy of the task ``repair`` with other texts in some files, by their names without an ending."""
    folder = shutil.copytree(TASKS / "repair", tmp_path / "changed")
    files = {path.stem: path for path in folder.rglob("*") if path.is_file()}
    for name, text in texts.items():
        files[name].write_text(text)
    return folder


def started(folder: Path, **arguments: Any) -> HarborEnvironment:
    env = HarborEnvironment({"folder": str(folder)}, **arguments)
    env.reset()
    return env


def call(name: str, **arguments: str) -> list[dict[str, Any]]:
    return [{"id": "a", "function": {"name": name, "arguments": json.dumps(arguments)}}]


def run(env: HarborEnvironment, command: str) -> str:
    return env.step(call("shell", command=command))[0]["tool_outputs"]["a"]


@pytest.mark.slow
def test_each_task_gives_its_rewards_or_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(TASKS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "count: 0.25 untouched, 1 by the solution"
    assert lines[1] == "repair: 0 untouched, 1 by the solution"
    assert lines[2].startswith("image: rejected. ")
    assert main(["nowhere"]) == main([str(TASKS / "count")]) == 2
    assert re.search(
        "nowhere has no task of Harbor.* no folder: correct .*/count has .*: name the folder",
        capsys.readouterr().err,
        re.DOTALL,
    )


def test_tasks_of_a_folder_are_rows_and_others_are_named() -> None:
    tasks, rejected = harbor_tasks(TASKS)
    assert [(row["name"], Path(row["folder"])) for row in tasks] == [
        (name, TASKS / name) for name in ("count", "repair")
    ]
    assert tasks[1]["question"].startswith("`/app/prices.py` adds up prices wrongly.")
    assert re.search(
        r"image/environment/Dockerfile, line 4: RUN make cannot be followed.*COPY", rejected["image"]
    )
    with pytest.raises(DatasetError, match="no task of Harbor"):
        harbor_tasks(TASKS.parent / "unit")


def test_task_of_terminal_bench_1_is_rejected_by_name(tmp_path: Path) -> None:
    """In a folder as its repository has them: ``harbor_tasks`` passed over it in silence."""
    shutil.copytree(TASKS / "repair", tmp_path / "repair")
    older = tmp_path / "hello-world"
    (older / "tests").mkdir(parents=True)
    for name, text in {
        "task.yaml": "instruction: |-\n  Create a file called hello.txt.\nparser_name: pytest\n",
        "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\nWORKDIR /app\n",
        "docker-compose.yaml": "services:\n  client:\n    build: .\n",
        "run-tests.sh": "uv run pytest $TEST_DIR/test_outputs.py -rA\n",
        "solution.sh": "echo 'Hello, world!' > hello.txt\n",
        "tests/test_outputs.py": "def test_it(): ...\n",
    }.items():
        (older / name).write_text(text)
    tasks, rejected = harbor_tasks(tmp_path)
    assert [row["name"] for row in tasks] == ["repair"]
    assert "hello-world has task.yaml, the form of terminal-bench 1" in rejected["hello-world"]
    shutil.rmtree(tmp_path / "repair")
    with pytest.raises(DatasetError, match="write it in Harbor"):
        harbor_tasks(tmp_path)


@pytest.mark.slow
def test_files_and_directory_last_from_call_to_call() -> None:
    env = started(TASKS / "repair")
    assert run(env, "mkdir -p a/b; cd a/b; echo 7 > c; export X=1; echo $CURRENCY") == "euro"
    assert run(env, "pwd; cat c; echo $X; ls /app; exit 3") == "/app/a/b\n7\n\na\nprices.py\n[exit code 3]"
    assert (
        "has this text 0 times" in env.step(call("edit", path="c", old="8", new="9"))[0]["tool_outputs"]["a"]
    )
    env.step(call("edit", path="c", old="7", new='it\'s "9"\n'))
    env.step(call("edit", path="d", old="", new="new"))
    assert run(env, "cat c d") == 'it\'s "9"\n\nnew'
    assert run(env, "cd /app") == "(no output)"
    assert run(env, REPAIR) == "(no output)"
    observation, reward, done, info = env.step("Done.")
    assert (observation, reward, done, info["response"]) == ({}, 1.0, True, "Done.")
    assert env.is_correct()
    assert env.compute_metrics() == {"called": 1.0, "success_when_called": 1.0}
    assert "Read-only file system" in run(started(TASKS / "repair"), "echo 1 > /etc/passwd")


@pytest.mark.slow
def test_32_sessions_are_judged_apart() -> None:
    def reward(number: int) -> float:
        env = started(TASKS / "repair")
        together.wait(120)
        assert run(env, f"echo {number} > mine; ls; {REPAIR if number % 2 else 'true'}") == "mine\nprices.py"
        assert run(env, "cat mine") == str(number)
        return env.step("Done.")[1]

    together = threading.Barrier(32)
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(reward, range(32))) == [0.0, 1.0] * 16


@pytest.mark.slow
def test_steps_that_are_used_up_are_judged_too() -> None:
    env = started(TASKS / "repair", max_steps=2)
    run(env, REPAIR)
    assert env.step(call("shell", command="rm prices.py"))[1:3] == (1.0, True)


ATTACKS = {
    "reward beforehand": ["mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"],
    "program left running": [
        "setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' "
        ">/dev/null 2>&1 & sleep 0.5"
    ],
    "interpreter of its own": [
        "mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python3; chmod +x bin/python3",
        "for name in bash env python; do cp bin/python3 bin/$name; done; /app/bin/python3",
        "cp bin/python3 /usr/bin/python3; cp bin/python3 $(readlink -f $(command -v python3))",
    ],
    "link in the place of the reward": [
        "echo 1 > reward.txt; mkdir verifier; cp reward.txt verifier",
        "ln -s /app /logs; ln -s /app /logs/verifier; ln -s /app/reward.txt /logs/verifier/reward.txt",
        "cd /; mv app old; rm -rf app; ln -s /logs app",
    ],
    "tests of its own": ["mkdir /tests; echo > /tests/check.py; ln -s /app /tests; echo > /app/check.py"],
    "forged answer of its shell": [f"cat > forge.py <<'END'\n{FORGED_ANSWER}\nEND", "python3 forge.py"],
    "end of its shell": ["kill -9 $PPID", "kill -9 -1"],
    "startup files": [
        "echo 'echo 1 > /logs/verifier/reward.txt; exit 0' | tee ~/.bashrc ~/.profile ~/.bash_profile",
        "export BASH_ENV=~/.bashrc ENV=~/.bashrc PYTHONSTARTUP=~/.bashrc; echo 'exit()' > sitecustomize.py",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("commands", ATTACKS.values(), ids=ATTACKS)
def test_reward_cannot_be_had_by_attack(commands: list[str]) -> None:
    env = started(TASKS / "repair")
    for command in commands:
        run(env, command)
    assert env.step("Done.")[1:3] == (0.0, True)


def test_tests_and_solution_are_not_to_be_found() -> None:
    env = started(TASKS / "repair")
    assert run(env, "ls /tests /solution /logs").count("No such file or directory") == 3
    assert run(env, f"ls {TASKS}; cat /proc/1/cwd/* /proc/*/root{TASKS}/*").count("No such file") >= 2


@pytest.mark.slow
def test_output_and_time_of_a_command_are_bounded() -> None:
    env = started(TASKS / "repair", command_seconds=1.0)
    assert len(run(env, "yes | head -c 5000000")) < 9000
    assert run(env, "echo begun; sleep 60") == "begun\n[stopped: it ran longer than 1 s]"
    assert "15 fit" in run(env, "head -c 20000000 /dev/urandom > big")
    assert run(env, "ls") == "prices.py"


@pytest.mark.slow
def test_files_with_holes_do_not_end_the_shell() -> None:
    env = started(TASKS / "repair")
    assert "files take 80 MiB without holes" in run(env, "truncate -s 40M a b")
    assert run(env, "ls") == "prices.py"
    assert run(env, "truncate -s 40M a; ln a b") == "(no output)"
    assert run(env, "ls") == "a\nb\nprices.py"


@pytest.mark.slow
def test_time_of_the_agent_ends_the_episode(tmp_path: Path) -> None:
    env = started(changed(tmp_path, task="[agent]\ntimeout_sec = 1.5\n"))
    run(env, REPAIR)
    assert env.step(call("shell", command="sleep 60"))[1:3] == (1.0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 1", "there is no reward in /logs/verifier/reward.json or reward.txt.*ended with 1"),
        ("echo right > /logs/verifier/reward.txt", "there is no reward"),
        ("echo nan > /logs/verifier/reward.txt", "there is no reward"),
        ("ln -s /tests/test.sh /logs/verifier/reward.txt", "there is no reward"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "took longer than .verifier. timeout_sec = 2"),
        ("kill -9 $(cut -d ' ' -f 4 /proc/$PPID/stat)", "left nothing: it was killed"),
    ],
)
def test_failure_of_the_tests_is_no_reward_of_zero(tmp_path: Path, test: str, reason: str) -> None:
    env = started(changed(tmp_path, test=test, task="[verifier]\ntimeout_sec = 2\n"))
    with pytest.raises(EnvironmentFailure, match=f"(?s)changed cannot judge: .*{reason}"):
        env.step("Done.")


@pytest.mark.slow
def test_failure_that_is_the_agents_is_a_reward_of_zero(tmp_path: Path) -> None:
    env = started(changed(tmp_path, task="[verifier]\ntimeout_sec = 3\n"))
    run(env, "echo 'while True: pass' > prices.py")
    _, reward, done, info = env.step("Done.")
    assert (reward, done, env.is_correct()) == (0.0, True, False)
    assert "took longer" in info["metadata"]["error"]


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("FROM a\nRUN make \\\n  all", "line 2: RUN make .* all cannot be followed: no image is built"),
        ("FROM a\n\n# note\nUSER me", "line 4: USER me"),
        ("FROM a\nWORKDIR /app\nCOPY --from=b /x /app/", "line 3: COPY .* without options"),
        ("FROM a\nWORKDIR /app\nCOPY ../solution /app/", r"no ../solution in environment/"),
        ("FROM a\nWORKDIR /app\nCOPY missing.py /app/", "no missing.py in environment/"),
        ("FROM a\nWORKDIR /app\nCOPY prices.py /", "choose a target such as /app/"),
        ("FROM a\nWORKDIR /app\nENV", "line 3: ENV"),
        ("FROM a\nWORKDIR /app\nCOPY [1", "line 3: COPY"),
        ("FROM a", "add WORKDIR /app"),
    ],
)
def test_dockerfile_that_cannot_be_followed_is_rejected(tmp_path: Path, dockerfile: str, reason: str) -> None:
    with pytest.raises(DatasetError, match=f"(?s)changed/environment/Dockerfile.*{reason}"):
        read_task(changed(tmp_path, Dockerfile=dockerfile))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            "agent = 3\n[verifier]\ntimeout_sec = -1",
            "verifier.timeout_sec = -1: write a number from 0 to 1e6",
        ),
        ("[verifier]\ntimeout_sec = 'long'", "verifier.timeout_sec = 'long'"),
        ("[verifier.env]\nKEY = '${KEY}'", "verifier.env.KEY = '\\${KEY}' takes a variable of this machine"),
        ("[environment]\nenv = 3", "environment.env = 3"),
        ("[environment]\ngpus = 1", "environment.gpus = 1 cannot be played"),
        ("[[steps]]\nname = 'a'", "steps = .* cannot be played"),
        ("[agent", "cannot be read"),
    ],
)
def test_settings_that_cannot_be_met_are_rejected(tmp_path: Path, settings: str, reason: str) -> None:
    with pytest.raises(DatasetError, match=reason):
        read_task(changed(tmp_path, task=settings))


IN_A_ROOT_OF_ITS_OWN = """
set -e
mount -t tmpfs root $ROOT
for folder in /*/; do
    case $folder in /app/ | /logs/ | /tests/ | /tmp/) continue ;; esac
    mkdir $ROOT$folder
    mount --rbind $folder $ROOT$folder
done
mkdir $ROOT/tmp $ROOT/app
home=$(dirname $(dirname $0))
case $home in  # where Python is
    /tmp/*) mkdir -p $ROOT$home && mount --rbind $home $ROOT$home ;;
esac
printf '%s' "$MADE" > $ROOT/app/made.py
exec chroot $ROOT "$0" "$@"
"""
"""Stands in for a container: as root, on a file system where /app can be made."""


def image_with(made: str, root: Path) -> CommandSandbox:
    root.mkdir(exist_ok=True)
    shell = ["sh", "-c", IN_A_ROOT_OF_ITS_OWN, sys.executable]
    isolation = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return CommandSandbox(["env", f"MADE={made}", f"ROOT={root}", "unshare", *isolation, *shell])


@pytest.mark.slow
def test_image_of_the_user_brings_what_its_dockerfile_makes(tmp_path: Path) -> None:
    folder = changed(
        tmp_path,
        Dockerfile="FROM a\nWORKDIR /app\nRUN make",
        check="import sys; sys.path.insert(0, '/app'); import made",
        test=IMPORTED,
    )
    (row,) = harbor_tasks(folder.parent, is_built=True)[0]
    env = HarborEnvironment(row, sandbox=image_with("raise OSError", tmp_path / "root"))
    env.reset()
    assert run(env, "ls; echo 1 > /made; cat made.py") == "made.py\nraise OSError"
    assert run(env, "ls /made; mkdir a; cd a; echo > ../made.py").startswith("ls: cannot access '/made'")
    assert run(env, "pwd; cat ../made.py") == "/app/a"
    assert env.step("Done.")[1:3] == (1.0, True)
    env.reset()
    assert env.step("Done.")[1:3] == (0.0, True)
    missing = changed(tmp_path / "b", Dockerfile="FROM a\nWORKDIR /missing\nRUN make")
    with pytest.raises(EnvironmentFailure, match=r"has no /missing that .* packed: .*No such file"):
        started(missing, sandbox=image_with("", tmp_path / "root"))


def test_folder_that_cannot_be_made_is_rejected(tmp_path: Path) -> None:
    folder = changed(tmp_path, Dockerfile="FROM a\nWORKDIR /usr/lib/app\nCOPY prices.py .")
    with pytest.raises(DatasetError, match=r"'/usr/lib/app'.* such as /app"):
        harbor_tasks(folder.parent)
    for folders in (("app",), ("/app", "/app/b"), ("/proc/a",), ("/",)):
        with pytest.raises(ConfigError, match=r"LocalSandbox\.folders"):
            LocalSandbox(folders=folders)


@pytest.mark.slow
def test_environment_passes_its_check() -> None:
    actions = [call("shell", command="ls"), call("edit", path="a", old="", new="b"), "Done."]
    report = check_environment(
        HarborEnvironment, {"folder": str(TASKS / "repair")}, actions=actions, timeout_seconds=60
    )
    assert report.ok, str(report)
    with pytest.raises(ConfigError, match="no 'folder'"):
        HarborEnvironment({"question": "?"})
