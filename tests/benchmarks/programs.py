"""Runs and evaluations as programs of their own: started, watched line by line, and never left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import repository

from launch.health.members import role_of

HERE = Path(__file__).resolve().parent
END_SECONDS = 30.0
"""What the processes of a run get to be gone once its driver is."""


def free_port() -> int:
    """A port of this machine on which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Program:
    """A ``command`` of launch with some overrides; modules of this folder can be its workload.

    ``before`` are words that come before the command, such as those that run it on another host.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        environment: dict[str, str] | None = None,
        command: str = "launch.train",
        before: Sequence[str] = (),
    ) -> None:
        self.lines: list[str] = []
        self._seconds: list[float] = []
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*before, sys.executable, "-u", "-m", command, *overrides],
            cwd=repository.ROOT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._replica_seconds: dict[float, float] = {}
        self._family: set[psutil.Process] = set()  # psutil tells a process from a later one with its id
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._seconds.append(time.monotonic())
            self.lines.append(line.rstrip())

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def num_steps(self) -> int:
        """Updates that this program has reported."""
        return sum(" step " in line and "reward" in line for line in self.lines)

    def moment(self, mark: str) -> float:
        """When it wrote the first line that contains ``mark``."""
        return next(seconds for seconds, line in zip(self._seconds, self.lines, strict=False) if mark in line)

    def look(self) -> None:
        """Note its processes, and how much CPU time its replicas have used."""
        seconds = 0.0
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                if role_of(" ".join(process.cmdline())) == "replica":
                    seconds += process.cpu_times().user + process.cpu_times().system
        self._replica_seconds[time.monotonic()] = seconds

    def engine_idle(self, start: float, end: float) -> float:
        """The share of the time between two moments in which its one replica used no CPU, as ``look`` saw."""
        seen = [moment for moment in self._replica_seconds if start <= moment <= end]
        used = self._replica_seconds[seen[-1]] - self._replica_seconds[seen[0]]
        return 1 - used / (seen[-1] - seen[0])

    def family(self) -> set[psutil.Process]:
        """All processes that descend from it, or did when this was asked before."""
        with suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._family

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if it did not end within ``seconds``."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(seconds)
        return status

    def end(self) -> int:
        """Have all its processes gone; return how many had to be killed for it."""
        family = self.family()
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(family, timeout=END_SECONDS)
        for process in left:
            process.kill()
        return len(left)


def run(
    overrides: Sequence[str],
    environment: dict[str, str] | None = None,
    command: str = "launch.train",
    ends: Sequence[int] = (0,),
) -> Program:
    """Run a program to its end; what it said is shown if its exit status is none of ``ends``."""
    program = Program(overrides, environment, command)
    try:
        while program.wait(2.0) is None:
            program.look()
    finally:
        program.end()
    if (status := program.process.returncode) not in ends:
        sys.exit("\n".join([*program.lines, f"The run failed with status {status}: {' '.join(overrides)}"]))
    return program


def trained(directory: Path, overrides: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run a training to its end, unless it has ended; one that was cut goes on. Returns its folder."""
    if not (directory / "done").exists():
        run([*overrides, f"run.directory={directory}", "run.resume=true"], environment)
        (directory / "done").touch()
    return str(directory)


def warm_started_model(
    recipe: str,
    folder: Path,
    num_steps: int,
    seed: int = 0,
    more: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> str:
    """A model that has learned from the recipe's demonstrations and nothing else; returns its folder."""
    overrides = [
        f"recipe={recipe}",
        f"seed={seed}",
        f"warm_start.num_steps={num_steps}",
        "run.num_steps=1",
        "learner.optimizer.lr=0",
        "evaluation.num_tasks=1",
        "rollout.groups_per_step=1",
        "rollout.group_size=2",
        "fleet.num_actors=2",
        *more,
    ]
    return trained(folder / f"warm-{recipe}-{seed}", overrides, environment)


def success(recipe: str, model: str, folder: Path, times: int = 4) -> float:
    """The share of right answers when each held-out task of the recipe is played several times."""
    overrides = [
        f"recipe={recipe}",
        f"model.path={model}",
        f"run.directory={folder}",
        f"evaluation.rollouts_per_task={times}",
        "fleet.num_actors=32",
        "fleet.pairs_per_actor=8",  # four processes start in a fraction of the time
    ]
    program = run(overrides, command="launch.evaluate")
    line = next(line for line in program.lines if line.startswith("success "))
    return float(line.split()[1])
