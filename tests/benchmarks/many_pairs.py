"""What a pair costs in a run of ``guess`` with very many, and whether a storm of kills loses a rollout.

    python tests/benchmarks/many_pairs.py [--runs 1024x64,128x1] [--updates 3] [--kills 8]

Each run has so many pairs, so many of them in a rollout actor, and as many rollouts in an update as pairs.
Everything is real but the engine, which plays a script. Memory (PSS) and CPU time are those of the rollout
actors and all below them, when the last pair is up. From then on a process of a pair, or a whole rollout
actor with its pairs, is killed every few seconds. What the run has consumed is checked at its end as by
``launch.verify``. 1,024 pairs take about 9 GB.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import repository
from programs import Program
from report import Report

from launch.chaos import COUNTED
from launch.reporting.audit import audit, read_run
from launch.reporting.tracker import read_metrics

GROUP_SIZE = 8
ACTOR = "ray::RolloutActor"
LIMIT_SECONDS = 1500.0
KILL_SECONDS = 3.0


def overrides_of(pairs: int, per_actor: int, updates: int, directory: Path) -> list[str]:
    """Settings of a run of ``guess`` without a model's time."""
    return [
        "recipe=guess",
        f"run.directory={directory}",
        f"run.num_steps={updates}",
        "run.checkpoints.every=1000",
        f"run.trajectories_kept={2 * pairs * updates}",
        "warm_start.num_steps=0",
        "evaluation.num_tasks=1",
        "server.engine.name=scripted_engine:ScriptedEngine",
        "server.engine.options={replies: ['1001', '4575', '8888'], logprob: -1.0, seconds_per_token: 0.1}",
        f"rollout.groups_per_step={pairs // GROUP_SIZE}",
        f"rollout.group_size={GROUP_SIZE}",
        f"learner.mini_batch_size={pairs}",
        f"fleet.num_actors={pairs}",
        f"fleet.pairs_per_actor={per_actor}",
        "fleet.nodes={CPU: 0}",
        "fleet.retries=20",
        "learner.mismatch_alarm=10",  # the script has no model's log-probabilities
    ]


class Pairs:
    """Processes of a run's pairs."""

    def __init__(self, program: Program, per_actor: int) -> None:
        self._program, self._per_actor = program, per_actor
        self.actors: list[psutil.Process] = []
        self.own: list[psutil.Process] = []
        """A process for each pair, where they have one."""

    def find(self) -> int:
        """Find what is there now; return how many pairs are up."""
        self.actors, self.own = [], []
        for process in psutil.Process(self._program.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(ACTOR):
                    self.actors.append(process)
        for zygote in [each for actor in self.actors for each in actor.children()]:
            with suppress(psutil.NoSuchProcess):
                self.own += zygote.children()
        return len(self.actors) if self._per_actor == 1 else len(self.own)

    def costs(self) -> tuple[float, float]:
        """MB (PSS) and CPU seconds of them all."""
        memory = seconds = 0.0
        for process in {each for actor in self.actors for each in (actor, *actor.children(recursive=True))}:
            with suppress(psutil.NoSuchProcess):
                memory += process.memory_full_info().pss / 1e6
                times = process.cpu_times()
                seconds += times.user + times.system
        return memory, seconds

    def kill_one(self, rng: random.Random) -> int:
        """Kill one of the pairs, or a rollout actor with all of its own; return how many were killed."""
        self.find()
        if kinds := [each for each in (self.own, self.actors) if each]:
            with suppress(psutil.NoSuchProcess):
                rng.choice(rng.choice(kinds)).kill()
                return 1
        return 0  # the run has ended its rollouts


def measure(pairs: int, per_actor: int, updates: int, kills: int, directory: Path) -> tuple[list[str], bool]:
    """Cells of a row, and whether nothing was lost."""
    start, rng = time.monotonic(), random.Random(0)
    path = os.pathsep.join([str(repository.ROOT / "tests")])
    program = Program(overrides_of(pairs, per_actor, updates, directory), {"PYTHONPATH": path})
    processes, first = Pairs(program, per_actor), 0.0
    try:
        while (count := processes.find()) < pairs:
            first = first or (time.monotonic() if count else 0.0)
            if not program.is_alive or time.monotonic() - start > LIMIT_SECONDS:
                sys.exit("\n".join([*program.lines, f"{count} of {pairs} pairs are up."]))
            time.sleep(1)
        up = time.monotonic()
        memory, seconds = processes.costs()
        num_kills = 0
        while num_kills < kills and program.wait(KILL_SECONDS) is None:
            num_kills += processes.kill_one(rng)
        program.wait(LIMIT_SECONDS - (time.monotonic() - start))
        if program.process.returncode != 0:
            sys.exit("\n".join([*program.lines, f"The run ended with {program.process.returncode}."]))
    finally:
        program.end()
    records = read_run(directory)
    findings = audit(records)
    for finding in findings:
        print(finding)
    metrics = read_metrics(directory)
    for name in COUNTED:
        print(f"{name}: {sum(each.get(name, 0) for each in metrics):g}")
    cells = [
        f"{pairs} in {-(-pairs // per_actor)}",
        f"{memory / pairs:.1f}",
        f"{seconds / pairs:.2f}",
        f"{up - first:.0f}",
        f"{up - start:.0f}",
        str(num_kills),
        str(sum(len(each["trained"]) for each in records.consumed)),
        f"{time.monotonic() - start:.0f}",
    ]
    return cells, all(each.is_sound for each in findings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", default="1024x64,128x1", help="pairs, and how many of them an actor has")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--kills", type=int, default=8)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))  # what was started is ended
    columns = ("pairs in actors", "PSS MB a pair", "CPU s a pair", "seconds from first to last")
    report = Report(
        f"guess with a scripted engine, {arguments.updates} updates of as many rollouts as there are pairs",
        (*columns, "from the command", "kills", "rollouts trained on", "whole run s"),
    )
    is_sound = True
    for run in arguments.runs.split(","):
        pairs, per_actor = map(int, run.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            cells, sound = measure(pairs, per_actor, arguments.updates, arguments.kills, Path(folder, "run"))
        report.add(*cells)
        is_sound &= sound
    report.print()
    sys.exit(not is_sound)


if __name__ == "__main__":
    main()
