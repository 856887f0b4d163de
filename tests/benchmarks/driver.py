"""CPU seconds of the driver's process for each update, and of its log's thread, in a real training.

    python tests/benchmarks/driver.py [--rollouts 64] [--turns 20] [--tokens 200] [--updates 6]

Fleet, stream, queue, learner and log are real. The engine is scripted: the driver has no part in sampling.
All threads of the process count: the loop's, Ray's, and those that watch and report.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import repository
from programs import run
from report import Report

from environments import BaseEnv, Dataset
from environments.types import TrajectoryGroup
from launch.reporting.tracker import read_metrics
from launch.reporting.trackers.base import BaseTracker
from launch.training.stages import policy_update
from launch.training.stages.policy_update import record
from launch.workload import Workload
from policies import GameAgent

TURNS = "TROUPE_BENCHMARK_TURNS"
GROUP_SIZE = 8


class Talk(BaseEnv):
    """Answers each turn with a word, and rewards the rollout at random."""

    def __init__(self, number: int) -> None:
        self._number, self._turn = number, 0

    @staticmethod
    def from_dict(info: dict[str, Any]) -> Talk:
        return Talk(info["number"])

    def reset(self) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return f"What is {self._number}+1?", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self._turn += 1
        return "What is 2+2?", float(os.urandom(1)[0] % 2), self._turn == int(os.environ[TURNS]), {}


class DriverCpu(BaseTracker):
    """Measures the CPU seconds that the driver has used since the update before, and those of its log."""

    def __init__(self) -> None:
        self._before = time.process_time()
        self._log_cpu = 0.0
        policy_update.record = self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        before = time.thread_time()
        record(*args, **kwargs)
        self._log_cpu += time.thread_time() - before

    def measure(self, step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        before, self._before = self._before, time.process_time()
        log, self._log_cpu = self._log_cpu, 0.0  # of the update before, which is recorded during this one
        return {"driver_cpu": self._before - before, "log_cpu": log}


def workload(seed: int) -> Workload:
    tasks = Dataset([{"number": number} for number in range(100)], name="talk", split="train")
    return Workload(agent_class=GameAgent, env_class=Talk, train_dataset=tasks, val_dataset=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("rollouts", 64), ("turns", 20), ("tokens", 200), ("updates", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    reply = " ".join(["7"] * (given.tokens // 2))
    room = given.turns * (given.tokens + 50) + 100
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "workload=driver",
            f"model.path={models.tiny(Path(folder))}",
            f"run.directory={folder}/run",
            f"run.num_steps={given.updates}",
            "run.checkpoints.every=1000",
            "run.trackers=[driver:DriverCpu]",
            "server.engine.name=scripted_engine:ScriptedEngine",
            f"server.engine.options={{replies: ['{reply}'], logprob: -1.0}}",
            f"server.engine.max_model_tokens={room}",
            f"rollout.groups_per_step={given.rollouts // GROUP_SIZE}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.max_steps={given.turns}",
            "rollout.max_prompt_tokens=100",
            f"rollout.max_response_tokens={room - 100}",
            f"learner.micro_batch_tokens={2 * room}",
            "fleet.num_actors=8",
        ]
        path = os.pathsep.join(
            [str(repository.ROOT / "tests"), str(repository.ROOT / "tests" / "benchmarks")]
        )
        run(overrides, {TURNS: str(given.turns), "PYTHONPATH": path})
        updates = [each for each in read_metrics(Path(folder, "run")) if "learn/loss" in each]
    size = f"{given.rollouts} rollouts, {given.turns} x {given.tokens} tokens"
    title = f"CPU seconds of the driver for an update of {size}"
    report = Report(title, ["update", "CPU seconds", "of the log", "wall", "turns", "sampled tokens"])
    for number, each in enumerate(updates, 1):
        sizes = [f"{each[name]:.0f}" for name in ("rollout/requests", "rollout/sampled_tokens")]
        cpu, log = each["rollout/driver_cpu"], each["rollout/log_cpu"]
        report.add(str(number), f"{cpu:.2f}", f"{log:.3f}", f"{each['time/step']:.1f}", *sizes)
    report.print()


if __name__ == "__main__":
    main()
