"""A process that 64 open sessions of programs need is killed: what is lost, doubled, or left behind.

    python tests/benchmarks/killed_sessions.py [--struck actor,replica,driver]

Each session is a process of its own with OpenAI's client, which calls the policy of a real training by the
gateway, several times and with its whole history. In each update but the last, when all of its sessions are
in their middle, one process gets a SIGKILL: a rollout actor, in which sixteen of the sessions live, the
replica, or the driver, whose run is resumed by the same command. In the end each rollout has to have been
trained on once, with all of its calls, and no program may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import models
import psutil
import repository  # noqa: F401
from programs import Program
from report import Report

from actors.gateway.client import PolicyClient
from environments import Dataset
from launch.fault_injection.fault import send_signal
from launch.run_folder.consumed_log import read_consumed_log
from launch.run_folder.trajectory_log import TRAIN, read_kept
from launch.workload import Workload
from policies.learning.samples import training_samples

NUM_SESSIONS, GROUP_SIZE, NUM_CALLS = 64, 8, 6
MIDDLE = NUM_CALLS // 2
"""Number of the call after which programs wait for each other, so that all are open at the same time."""
NOTES = "TROUPE_BENCHMARK_NOTES"
"""Variable with the file into which programs write their process's id and start, and the number of a call."""
HOLD = ".hold"
"""End of the name of a file beside it: as long as that is there, programs wait in the middle."""
MARK = "--a-program-of-killed-sessions"
PROGRAM = """
import os, sys, time
import openai

start = time.time()

def note(number):
    with open(os.environ["NOTES"], "a") as file:
        print(os.getpid(), start, number, file=file)

client, messages = openai.OpenAI(), []
note(0)
for number in range(1, int(sys.argv[1]) + 1):
    messages.append({"role": "user", "content": "What is 2+2?"})
    answer = client.chat.completions.create(model="m", messages=messages, max_tokens=8)
    messages.append(answer.choices[0].message)
    note(number)
    while number == int(sys.argv[2]) and os.path.exists(os.environ["NOTES"] + sys.argv[3]):
        time.sleep(0.05)
"""
CALLS_SECONDS = 0.2
"""Seconds from the moment at which all programs go on until the kill: their calls are under way."""
WAIT_SECONDS = 400.0


def solve(task: dict[str, Any], client: PolicyClient) -> float:
    command = [sys.executable, "-c", PROGRAM, str(NUM_CALLS), str(MIDDLE), HOLD, MARK]
    result = client.run(command, environment={"NOTES": os.environ[NOTES]})
    assert result.exit_code == 0, result.output
    return random.random()


def workload(seed: int) -> Workload:
    tasks = Dataset([{"number": number} for number in range(100)], name="killed", split="train")
    return Workload(rollout=solve, train_dataset=tasks, val_dataset=None)


def last_calls(notes: Path) -> dict[tuple[int, str], int]:
    """Number of the last call of each program, by its process's id and start."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return {(int(pid), start): int(number) for pid, start, number in map(str.split, lines)}


def num_open(notes: Path, before: int) -> int:
    """Number of living programs that have made their call ``MIDDLE``, and not yet the call ``before``."""
    calls = last_calls(notes).items()
    return sum(MIDDLE <= number < before and psutil.pid_exists(pid) for (pid, _), number in calls)


def wait_until(holds: Callable[[], bool], program: Program) -> None:
    """Wait; exit with the output where that takes too long, or the run has ended."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        program.family()
        if not program.is_alive or time.monotonic() > deadline:
            sys.exit("\n".join([*program.lines, "The run has ended, or stands still."]))
        time.sleep(0.05)


def programs_left() -> int:
    """Number of living programs of sessions."""
    found = 0
    for process in psutil.process_iter(["cmdline", "status"]):
        found += MARK in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--struck", default="actor,replica,driver", help="roles; one may come several times")
    struck = parser.parse_args().struck.split(",")
    title = f"{NUM_SESSIONS} open sessions of {NUM_CALLS} calls, and a SIGKILL in the middle of them"
    report = Report(title, ("killed", "update", "open", "the run", "seconds to the next update"))
    with tempfile.TemporaryDirectory() as temporary:
        folder, notes = Path(temporary, "run"), Path(temporary, "notes")
        hold = notes.with_suffix(HOLD)
        hold.touch()
        overrides = [
            "workload=killed_sessions",
            f"model.path={models.tiny(Path(temporary))}",
            f"run.directory={folder}",
            f"run.num_steps={len(struck) + 1}",
            "run.resume=true",
            "run.checkpoints.every=1",
            "algorithm.zero_signal_groups=keep",
            f"rollout.groups_per_step={NUM_SESSIONS // GROUP_SIZE}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.max_steps={NUM_CALLS + 1}",
            f"fleet.num_actors={NUM_SESSIONS}",
            "fleet.pairs_per_actor=16",
        ]

        def start() -> Program:
            return Program(overrides, {NOTES: str(notes)})

        program = start()
        try:
            for update, role in enumerate(struck, 1):
                wait_until(lambda: num_open(notes, MIDDLE + 1) >= NUM_SESSIONS, program)
                hold.unlink()
                time.sleep(CALLS_SECONDS)
                count = num_open(notes, NUM_CALLS)
                send_signal(role, SIGKILL, program.process.pid, random.Random(0))
                moment = time.monotonic()
                if role == "driver":
                    program.wait(WAIT_SECONDS)
                    program.end()
                    program = start()
                wait_until(partial(is_made, folder, update), program)
                hold.touch()
                outcome = "is resumed" if role == "driver" else "goes on"
                report.add(role, str(update), str(count), outcome, f"{time.monotonic() - moment:.1f}")
            hold.unlink()
            program.wait(WAIT_SECONDS)
        finally:
            program.end()
        report.print()
        num_updates = len(struck) + 1
        faults = faults_of(
            folder, num_updates, num_updates * NUM_SESSIONS // GROUP_SIZE, GROUP_SIZE, [NUM_CALLS]
        )
        calls = last_calls(notes)
        ended = sum(number == NUM_CALLS for number in calls.values())
        left = programs_left()
        print(f"programs: {len(calls)} started, {ended} came to their end, {left} are left")
    print("\n".join(faults) if faults else "No session is lost, and none is counted twice.")
    sys.exit(bool(faults or left))


def is_made(folder: Path, update: int) -> bool:
    """Whether the run has made an update."""
    return len(read_consumed_log(folder)) >= update


def faults_of(
    folder: Path, num_updates: int, num_groups: int, group_size: int, num_calls: Sequence[int]
) -> list[str]:
    """What is wrong with the rollouts that were trained on, as sentences.

    Each has to be there once, with one of ``num_calls`` in one sequence.
    """
    trained = Counter(name for record in read_consumed_log(folder) for name in record["trained"])
    expected = {f"{group:08d}/{member:04d}" for group in range(num_groups) for member in range(group_size)}
    faults = [f"lost: {name}" for name in sorted(expected - trained.keys())]
    faults += [f"counted {count} times: {name}" for name, count in trained.items() if count > 1]
    faults += [f"not of this run: {name}" for name in sorted(trained.keys() - expected)]
    for step in range(1, num_updates + 1):
        for trajectory in (kept.trajectory for kept in read_kept(folder, TRAIN, step)):
            found = len(trajectory.steps), len(training_samples(trajectory))
            if found[0] not in num_calls or found[1] != 1:
                faults.append(f"{trajectory.rollout_id}: {found[0]} calls in {found[1]} sequences")
    print(f"sessions: {len(expected)} of {num_updates} updates, {len(faults)} faults")
    return faults


if __name__ == "__main__":
    main()
