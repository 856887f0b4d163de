"""Repositories with a bug: made the same each time, failing as they are, repaired by their solutions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from environments.adapters.harbor import HarborEnvironment, harbor_tasks, lines_about
from environments.data.repairs import main, write_repairs, write_repairs_of
from launch.recipes import repairs

LINKED = (  # the file that is read first, by a name below which all folders are one
    "import os; here = os.environ['HOME'] + '/.folders/'; "
    "os.link(here + '0/one', here + '2/verifier/reward.json')"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repairs")
    counts = write_repairs(folder)
    assert counts["train"] >= 40
    assert counts["test"] >= 20
    return folder


@pytest.mark.slow
def test_splits_have_no_program_in_common_and_all_kinds_of_bugs(folder: Path) -> None:
    found = {
        split: [path.name.split("-") for path in (folder / split).iterdir()] for split in ("train", "test")
    }
    programs = {split: {name for name, _, _ in names} for split, names in found.items()}
    assert not programs["train"] & programs["test"]
    for names in found.values():
        assert len(Counter(kind for _, kind, _ in names)) >= 5


@pytest.mark.slow
def test_check_that_the_agent_sees_fails(folder: Path) -> None:
    task = next((folder / "train").glob("wrap-*"))
    check = [sys.executable, "check.py"]
    done = subprocess.run(check, cwd=task / "environment", capture_output=True, text=True, check=False)
    assert (done.returncode, "returned" in done.stdout, "calls failed" in done.stderr) == (1, True, True)


@pytest.mark.slow
def test_solution_alone_gets_the_reward(folder: Path, tmp_path: Path) -> None:
    for name in ("roman-number-1", "steps_between-condition-1", "is_balanced-operator-1"):
        (tmp_path / name).symlink_to(folder / "train" / name)
    for line in lines_about(tmp_path):
        assert line.endswith(": 0 untouched, 1 by the solution"), line


@pytest.mark.slow
@pytest.mark.parametrize(
    "forgery",
    [
        "import os; open('/logs/verifier/reward.txt', 'w').write('1')",
        "import os; os.symlink('/app/one', '/logs/verifier/reward.txt')",
        "import glob, os; here = os.environ['HOME'] + '/.folders/'; target = here + '2/verifier/reward.txt'\n"
        "os.fork() or [os.link(here + '0/one', target) for _ in iter(int, 1) if not os.path.exists(target)]",
        LINKED,
        f"{LINKED}; os.chmod('/logs/verifier', 0o555); os.chmod('/logs', 0o555)",
        f"{LINKED}; test = int(open(f'/proc/{{os.getppid()}}/stat').read().split()[3]); os.kill(test, 9)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; print(open('/tests/cases.json').read())",
        "import os; print(open(f'/proc/{os.getppid()}/mem', 'rb').read(1))",
        "import os; os._exit(0)",
    ],
)
def test_module_that_forges_its_verdict_gets_none(folder: Path, forgery: str, tmp_path: Path) -> None:
    name = "roman-number-1"
    judge = shutil.copytree(folder / "train" / name, tmp_path / name) / "tests" / "judge.py"
    if "os.fork" in forgery:  # it tries for as long as it is given, with a core of this machine
        patient = judge.read_text()
        assert patient.count("timeout=10") == 1
        judge.write_text(patient.replace("timeout=10", "timeout=2"))
    (row,) = harbor_tasks(tmp_path)[0]
    env = HarborEnvironment(row)
    env.reset()
    lines = f"{forgery}\ndef roman(number):\n    return 'I'\n"
    command = {"command": f"echo 1 > one; cat > roman.py <<'END'\n{lines}END"}
    env.step([{"id": "a", "function": {"name": "shell", "arguments": command}}])
    assert env.step("Done.")[1:3] == (0.0, True)


@pytest.mark.slow
def test_same_seed_makes_the_same_tasks(folder: Path, tmp_path: Path) -> None:
    assert write_repairs_of("is_balanced", tmp_path) == len(list(folder.glob("train/is_balanced-*"))) > 4
    for path in tmp_path.rglob("*.*"):
        assert path.read_bytes() == (folder / "train" / path.relative_to(tmp_path)).read_bytes()


@pytest.mark.slow
def test_arguments_that_name_no_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, status in ((["--help"], 0), ([], 2), (["--seed"], 2), (["a", "b"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert main(["file"]) == 2
    assert "file cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_recipe_shows_calls_that_can_be_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train/roman-number-1", "test/days_in-number-1"):
        shutil.copytree(folder / name, repairs.FOLDER / name)
    workload = repairs.workload(0)
    agent = workload.pair.make_agent()
    agent.reset()
    agent.update_from_env({"question": workload.train_dataset[0]["question"]}, 0.0, False, {})
    shown = [each["content"] for each in agent.chat_completions if each["role"] == "assistant"]
    assert len(shown) == 4 and shown[-1] == "I repaired last_digit."
    calls = [agent.update_from_model(each).action for each in shown[:-1]]
    assert [each[0]["function"]["name"] for each in calls] == ["shell", "shell", "edit"]
    old, new = (json.loads(calls[-1][0]["function"]["arguments"])[name] for name in ("old", "new"))
    names: dict[str, Any] = {}
    exec(repairs.CODE.replace(old, new), names)
    assert repairs.CODE.count(old) == 1 and names["last_digit"](123) == 3


def test_tasks_that_were_written_in_part_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "train").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repairs, "write_repairs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repairs.workload(0)
    assert list(tmp_path.iterdir()) == []


def test_tasks_that_another_process_has_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(folder: Path) -> None:
        write_repairs(folder)
        write_repairs(tmp_path / "repairs")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repairs, "write_repairs", slower)
    assert len(repairs.workload(0).train_dataset)
    assert [each.name for each in tmp_path.iterdir()] == ["repairs"]
