"""Sixty tasks, eighteen with environments that misbehave: nothing is lost, and no other task notices."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from echo_engine import EchoServer
from machine import wait_until

from actors.engine import AgentExecutionEngine
from environments import ActorNeeds, TerminationReason
from environments.base import BaseEnv
from policies import GameAgent

NUM_TASKS = 60
TIMEOUT_SECONDS = 24.0
ENDINGS = {
    "raise": TerminationReason.ENV_ERROR,
    "hang in reset": TerminationReason.TIMEOUT,
    "hang in step": TerminationReason.TIMEOUT,
    "exit": TerminationReason.CRASHED,
    "allocate": TerminationReason.OUT_OF_MEMORY,
    "return nonsense": TerminationReason.ENV_ERROR,
}
SHARE = 0.05


class UnrulyEnvironment(BaseEnv):
    """Has a child process and, while it is open, a file; then it does what its task says."""

    actor_needs = ActorNeeds(memory_bytes=128 << 20)

    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self._open = Path(info["folder"]) / f"{info['index']}-{os.getpid()}-{self._child.pid}.open"
        self._open.touch()

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> UnrulyEnvironment:
        return cls(info)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._info["do"] == "hang in reset":
            time.sleep(600)
        return {"question": self._info["question"]}, {}

    def step(self, action: str) -> Any:
        match self._info["do"]:
            case "raise":
                raise RuntimeError("The dice are gone.")
            case "hang in step":
                while True:  # as code does that computes: no call that a signal would end by itself
                    pass
            case "exit":
                os._exit(3)
            case "allocate":
                hoard = []
                while True:
                    hoard.append(bytearray(1 << 24))
            case "return nonsense":
                return "nonsense"
        return {}, float(action == self._info["question"]), True, {}

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._open.unlink()


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with EchoServer.running() as server:
        yield server


def unruly_tasks(folder: Path) -> list[dict[str, Any]]:
    period = round(1 / SHARE)
    doings = dict(enumerate(ENDINGS))
    return [
        {
            "index": index,
            "question": f"q{index}",
            "do": doings.get(index % period, "fine"),
            "folder": str(folder),
        }
        for index in range(NUM_TASKS)
    ]


def test_sixty_tasks_end_as_they_should(ray_cluster: None, server: EchoServer, tmp_path: Path) -> None:
    tasks = unruly_tasks(tmp_path)
    with AgentExecutionEngine(
        agent_class=GameAgent,
        env_class=UnrulyEnvironment,
        rollout_engine_args={"base_url": server.base_url},
        n_parallel_agents=12,
        trajectory_timeout=TIMEOUT_SECONDS,
        retry_limit=1,
    ) as engine:
        asyncio.run(engine.execute_tasks([tasks[-1]]))  # the sampler imports its client now
        trajectories = asyncio.run(engine.execute_tasks(tasks))

    assert [each.task for each in trajectories] == tasks
    expected = [ENDINGS.get(task["do"], TerminationReason.ENV_DONE) for task in tasks]
    assert Counter(each.termination_reason for each in trajectories) == Counter(expected)
    assert [each.termination_reason for each in trajectories] == expected
    for task, trajectory in zip(tasks, trajectories, strict=True):
        assert trajectory.reward == float(task["do"] == "fine")
        assert (trajectory.error is None) == (task["do"] == "fine")
    assert not any("Nothing could interrupt it" in (each.error or "") for each in trajectories)
    # What is still open died with its process: each was closed wherever there was somebody left to do it.
    left = [path.stem.split("-") for path in tmp_path.glob("*.open")]
    assert {tasks[int(index)]["do"] for index, _, _ in left} == {"exit"}
    wait_until(lambda: not any(_runs(int(pid)) for _, *pids in left for pid in pids), seconds=120)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
