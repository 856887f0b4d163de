"""A replica of a training run is stopped by SIGSTOP for a while: what the run does meanwhile, and afterwards.

    python tests/benchmarks/stopped_replica.py [--staleness 0,2] [--seconds 20]

A run of the calculator recipe with two replicas. After its first updates one replica is stopped, and later
continued. The table counts updates and seconds of each stretch, and how much CPU time the replica has used:
none while it is stopped, and afterwards it serves again. No update may have learned from tokens that are
older than the staleness allows, though the replica has slept through more versions than that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import psutil
import repository  # noqa: F401
from programs import Program, warm_started_model
from report import Report

from launch.health.members import members
from launch.reporting.tracker import read_metrics

NUM_STEPS = 60
RUN = [
    "recipe=calculator",
    f"run.num_steps={NUM_STEPS}",
    "run.checkpoints.every=1000",
    "warm_start.num_steps=0",
    "evaluation.num_tasks=8",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "fleet.num_actors=16",
    "server.num_replicas=2",
]
FIRST_STEPS = 8
"""Updates before the replica is stopped."""
LONGEST_SECONDS = 120.0
"""Without an update for so long, the run counts as hanging."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--staleness", default="0,2", help="values of rollout.max_staleness")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the replica is stopped")
    arguments = parser.parse_args()
    report = Report(
        f"one of two replicas stopped for {arguments.seconds:g} s",
        ("staleness", "stretch", "updates", "seconds", "longest without an update", "its CPU seconds"),
    )
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        model = warm_started_model("calculator", Path(folder), num_steps=100)
        for staleness in map(int, arguments.staleness.split(",")):
            directory = Path(folder) / f"staleness-{staleness}"
            program = Program(
                [
                    *RUN,
                    f"model.path={model}",
                    f"rollout.max_staleness={staleness}",
                    f"run.directory={directory}",
                ]
            )
            try:
                for stretch, figures in stop_one(program, arguments.seconds):
                    report.add(str(staleness), stretch, *figures)
            finally:
                program.end()
            oldest = max(each.get("stream/staleness_max", 0) for each in read_metrics(directory))
            if oldest > staleness:
                faults.append(f"max_staleness={staleness}: an update has learned from one {oldest} old.")
    report.print()
    print("\n".join(faults) if faults else "No token was older than allowed.")
    sys.exit(bool(faults))


def stop_one(program: Program, seconds: float) -> list[tuple[str, tuple[str, str, str, str]]]:
    """The figures of the stretches before, during and after, by name."""
    wait_until(program, lambda: program.num_steps() >= 2)  # the first ones take longer
    replica = next(each for each in members(program.process.pid) if each.role == "replica")
    process = psutil.Process(replica.pid)
    before = watch(program, process, lambda: program.num_steps() >= FIRST_STEPS)
    process.send_signal(SIGSTOP)
    end = time.monotonic() + seconds
    stopped = watch(program, process, lambda: time.monotonic() >= end)
    process.send_signal(SIGCONT)
    afterwards = watch(program, process, lambda: program.num_steps() >= NUM_STEPS - 1)
    if program.wait(LONGEST_SECONDS):
        sys.exit("\n".join([*program.lines, "The run failed."]))
    return [("before", before), ("stopped", stopped), ("afterwards", afterwards)]


def watch(
    program: Program, process: psutil.Process, is_over: Callable[[], bool]
) -> tuple[str, str, str, str]:
    """Updates, seconds, the longest time without an update, and the CPU seconds of ``process``."""
    start, first_step, cpu = time.monotonic(), program.num_steps(), sum(process.cpu_times()[:2])
    longest = wait_until(program, is_over)
    updates, seconds = program.num_steps() - first_step, time.monotonic() - start
    used = sum(process.cpu_times()[:2]) - cpu
    return str(updates), f"{seconds:.1f}", f"{longest:.1f}", f"{used:.2f}"


def wait_until(program: Program, is_over: Callable[[], bool]) -> float:
    """Return the longest time between two updates while waiting."""
    longest, reported, last = 0.0, program.num_steps(), time.monotonic()
    while not is_over():
        time.sleep(0.02)
        longest = max(longest, time.monotonic() - last)
        if program.num_steps() > reported:
            reported, last = program.num_steps(), time.monotonic()
        if longest > LONGEST_SECONDS or not program.is_alive:
            sys.exit("\n".join([*program.lines, "The run has ended or hangs."]))
    return longest


if __name__ == "__main__":
    main()
