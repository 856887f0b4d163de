"""Programs that start on one cluster take turns, and none holds what another one waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from head_node import ROOT, head_node

from launch.reporting.tracker import read_metrics

STARTER = """
import sys, time
import ray
from launch.cluster.turns import Turn

def say(line):
    print(line, flush=True)

ray.init()
turn = Turn(sys.argv[1], lambda _: None, say)
turn.take()
say("has the turn")
turn.wait_for_room([({"CPU": 1.0}, {}), ({"CPU": 0.5}, {}), ({"CPU": 0.0}, {})], lambda: "1.5 CPUs")

@ray.remote(num_cpus=1.5)
class Part:
    def answer(self):
        return "has all its parts"

part = Part.remote()
say(ray.get(part.answer.remote()))
if sys.argv[2] == "goes on":
    turn.end()
time.sleep(3600)
"""
"""A program that needs 1.5 CPUs and then runs for ever, in its turn or after it."""
SMALL = [
    "warm_start.num_steps=2",
    "evaluation.num_tasks=4",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "fleet.num_actors=4",
]


def program(log: Path, environment: dict[str, str], *command: str) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )


def wait_for(words: str, log: Path, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def end(programs: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in programs:
        each.kill()
        each.wait()


def test_turn_ends_with_its_program_by_sigkill_too(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in "abc"]
    programs: list[subprocess.Popen[bytes]] = []
    with head_node(2, RAY_AUTH_MODE="disabled") as environment:
        try:
            programs.append(program(logs[0], environment, "-c", STARTER, "program a", "stays in its turn"))
            wait_for("has all its parts", logs[0])
            programs.append(program(logs[1], environment, "-c", STARTER, "program b", "goes on"))
            wait_for("Waiting for its turn to start on this cluster, after program a.", logs[1])
            os.kill(programs[0].pid, signal.SIGKILL)
            wait_for("has all its parts", logs[1])
            programs.append(program(logs[2], environment, "-c", STARTER, "program c", "goes on"))
            wait_for("has the turn", logs[2])  # b goes on, but is not in its turn any more
            wait_for("Waiting for room: 1.5 CPUs.", logs[2])
            os.kill(programs[1].pid, signal.SIGKILL)
            wait_for("has all its parts", logs[2])
        finally:
            end(programs)


def test_trainings_take_turns_on_a_cluster_for_one_and_a_half(tmp_path: Path) -> None:
    """The second waits for room as long as the first trains, and then ends by itself."""
    logs, status = [tmp_path / "a.log", tmp_path / "b.log"], tmp_path / "status"
    with head_node(2, RAY_AUTH_MODE="disabled") as environment:  # each needs 1.54, of which the learner has 1

        def start(log: Path, num_steps: int) -> subprocess.Popen[bytes]:
            settings = [*SMALL, f"run.num_steps={num_steps}", f"run.directory={tmp_path / log.stem}"]
            return program(log, environment, "-m", "launch.train", "recipe=calculator", *settings)

        programs = [start(logs[0], 100_000)]
        try:
            wait_for("Ray: joined", logs[0])
            programs.append(start(logs[1], 1))  # it comes to its own turn while the first starts its parts
            status.touch()
            while "waits for room: 1.54 Ray CPUs" not in status.read_text():
                assert [each.poll() for each in programs] == [None, None], [log.read_text() for log in logs]
                time.sleep(3)  # it is a heavy program to start, beside those that it is about
                program(status, environment, "-m", "launch.status").wait()
            programs[0].send_signal(signal.SIGINT)
            ends = [each.wait(timeout=600) for each in programs]
            assert ends == [130, 0], [log.read_text() for log in logs]
        finally:
            end(programs)
    assert "Waiting for its turn to start on this cluster" in logs[1].read_text()
    assert any("learn/loss" in each for each in read_metrics(tmp_path / "a"))
    assert [each["step"] for each in read_metrics(tmp_path / "b") if "learn/loss" in each] == [1]
