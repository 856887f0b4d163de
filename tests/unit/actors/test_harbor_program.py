"""Programs on tasks of Harbor, through the gateway: repaired files are judged, and forged ones are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from shown_programs import REPAIR
from test_rollout_function import play

from actors.gateway.harbor_program import HarborProgram
from environments.data.repairs import write_repairs_of
from environments.errors import AgentError
from environments.types import Message, Trajectory
from launch.validation.workload import check_classes

TASKS = Path(__file__).parents[2] / "harbor_tasks"
AGENT = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(9):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    if answer["content"] == "Done.":
        break
    done = subprocess.run(["bash", "-c", answer["content"]], stdout=-1, stderr=-2, text=True)
    messages += [answer, {"role": "user", "content": done.stdout or "(no output)"}]
"""
"""An agent whose messages are shell commands, until one is "Done."."""
MENDED = "sed -i 's/prices\\[1:\\]/prices/' prices.py"


def played(*commands: str, folder: Path = TASKS / "repair", **program: Any) -> tuple[Trajectory, list[str]]:
    """The rollout in which the policy writes these commands, and what they have shown."""
    shown: list[str] = []

    def reply(messages: list[Message]) -> str:
        shown.append(messages[-1]["content"])
        return [*commands, "Done."][len(shown) - 1]

    command = ["python3", "../agent.py", "{question}"]
    rollout = HarborProgram(**{"command": command, "files": {"agent.py": AGENT}, **program})
    return play(rollout, reply, task={"folder": str(folder)}), shown[1:]


@pytest.mark.slow
def test_files_that_a_program_leaves_are_judged() -> None:
    trajectory, shown = played("ls; cat prices.py; echo $CURRENCY", MENDED)
    assert (trajectory.error, trajectory.reward, trajectory.is_correct) == (None, 1.0, True)
    assert len(trajectory.steps) == 3
    first = trajectory.steps[0].chat_completions[0]["content"]
    assert "prices" in first and first.endswith("stands for /app: name files from there.")
    assert shown[0].startswith("prices.py\n") and shown[0].endswith("euro\n")
    assert played()[0].reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands",
    [
        [f"ls /tests /solution {TASKS}; find / -name prices.py 2>/dev/null"],
        ["mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt"],
        ["rm prices.py; ln -s /tests/check.py prices.py", "ln -s /logs ../logs"],
        ["cd ..; rm -rf work; ln -s /etc work"],
        ["cd ..; echo forged > work.tgz; chmod 0 work.tgz; rm -rf work; touch work"],
        ["kill -9 $PPID; kill -9 -1"],
    ],
)
def test_program_that_cheats_gets_no_reward(commands: list[str]) -> None:
    trajectory, shown = played(*commands)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    if "find" in commands[0]:
        assert shown[0].count("No such file") == 3 and shown[0].count("prices.py") == 1


@pytest.mark.slow
def test_program_of_the_page_makes_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini.yaml").write_text("agent: {}")
    for split, program in (("train", "roman"), ("test", "days_in")):
        write_repairs_of(program, tmp_path / "repairs" / split)
    names: dict[str, Any] = {}
    exec(REPAIR, names)
    workload = names["workload"](0)
    assert workload.rollout.files == {"mini.yaml": "agent: {}"}
    assert {row["name"].split("-")[0] for row in workload.train_dataset} == {"roman"}
    assert {row["name"].split("-")[0] for row in workload.val_dataset} == {"days_in"}
    check_classes(workload)


def test_program_that_is_not_there_is_named() -> None:
    with pytest.raises(AgentError, match=r"'absent' is not found .* visible=\[\]"):
        played(command=["absent"])


def test_files_beside_workdir_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(TASKS / "repair", tmp_path / "two")
    with (folder / "environment" / "Dockerfile").open("a") as file:
        file.write("COPY prices.py /data/\n")
    with pytest.raises(
        AgentError, match=r"has files in /app, /data, and a program sees those of WORKDIR /app"
    ):
        played(folder=folder)
