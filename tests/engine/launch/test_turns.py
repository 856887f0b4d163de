"""Programs that start on one cluster take turns, and none holds what another one waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from followed_run import INTERRUPTED, SCRIPTED
from head_node import ROOT, head_node

from launch.reporting.tracker import read_metrics

STARTER = """
import sys, time
from pathlib import Path
import ray
from launch.cluster.turns import Turn

def say(line):
    print(line, flush=True)

ray.init()
name, goes_on = sys.argv[1:]
turn = Turn(name, lambda _: None, say)
turn.take()
say("has the turn")
turn.wait_for_room([({"CPU": 1.0}, {}), ({"CPU": 0.5}, {}), ({"CPU": 0.0}, {})], lambda: "1.5 CPUs")

@ray.remote(num_cpus=1.5)
class Part:
    def answer(self):
        return "has all its parts"

part = Part.remote()
say(ray.get(part.answer.remote()))
while not Path(goes_on).exists():
    time.sleep(0.1)
turn.end()
time.sleep(3600)
"""
"""A program that needs 1.5 CPUs and runs for ever: in its turn until a file is there, and then after it."""
TRAINING = [
    "recipe=calculator",
    "run.num_steps=100000",  # it is interrupted
    "warm_start.num_steps=0",
    "evaluation.num_tasks=4",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "fleet.num_actors=2",
    *SCRIPTED,
]


def program(log: Path, environment: dict[str, str], *command: str) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )


def wait_for(words: str, log: Path, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def test_programs_take_turns_to_start_and_wait_for_room(tmp_path: Path, tiny_model: Path) -> None:
    """A training and three others, on a cluster with room for one of them. Any may end by SIGKILL."""
    programs: dict[str, subprocess.Popen[bytes]] = {}
    logs = {name: tmp_path / f"{name}.log" for name in ("a", "training", "b", "c", "status")}
    a_goes_on, directory = tmp_path / "a goes on", tmp_path / "run"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))  # there is the script of the engine
    with head_node(2, RAY_AUTH_MODE="disabled", PYTHONPATH=path) as environment:

        def start(name: str, *command: str) -> None:
            programs[name] = program(logs[name], environment, *command)

        try:
            start("a", "-c", STARTER, "program a", str(a_goes_on))
            wait_for("has all its parts", logs["a"])
            settings = [*TRAINING, f"model.path={tiny_model}", f"run.directory={directory}"]
            start("training", "-m", "launch.train", *settings)
            wait_for("Waiting for its turn to start on this cluster, after program a.", logs["training"])
            a_goes_on.touch()
            wait_for("Waiting for room: 1.52 Ray CPUs", logs["training"])  # of which the learner has 1
            start("b", "-c", STARTER, "program b", "never")
            wait_for(", which waits for room: 1.52 Ray CPUs", logs["b"])
            logs["status"].touch()
            while "waits for room: 1.52 Ray CPUs" not in logs["status"].read_text():
                assert programs["training"].poll() is None, logs["training"].read_text()
                program(logs["status"], environment, "-m", "launch.status").wait()
            os.kill(programs["a"].pid, signal.SIGKILL)
            wait_for("has the turn", logs["b"])  # the training goes on, but is not in its turn any more
            wait_for("Waiting for room: 1.5 CPUs.", logs["b"])
            start("c", "-c", STARTER, "program c", "never")
            wait_for("Waiting for its turn to start on this cluster, after program b", logs["c"])
            while not any("learn/loss" in each for each in read_metrics(directory)):
                assert programs["training"].poll() is None, logs["training"].read_text()
                time.sleep(0.2)
            programs["training"].send_signal(signal.SIGINT)
            assert programs["training"].wait(timeout=600) == INTERRUPTED, logs["training"].read_text()
            wait_for("has all its parts", logs["b"])
            os.kill(programs["b"].pid, signal.SIGKILL)  # in its turn
            wait_for("has all its parts", logs["c"])
        finally:
            for each in programs.values():
                each.kill()
                each.wait()
