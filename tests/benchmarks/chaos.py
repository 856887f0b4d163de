"""Processes of a training run die at random moments: what the run says, and what a resume makes of it.

    python tests/benchmarks/chaos.py [--kinds driver,store] [--staleness 0,2] [--seed 0] [--recover]

A run of the calculator recipe is made twice, with the same seed: once undisturbed, once with a SIGKILL at
each of the moments, to every kind of process that a run has; to the driver also in its warm start, while a
checkpoint is written or copied and while weights are published. Where that ends the run it is resumed by the
same command, after a copy from the address alone; with --recover it has to go on by itself, but for its
driver and Ray's own processes. In the end both have to have consumed the same rollouts, each exactly once,
and with max_staleness=0 to have the same weights to the last bit. A strike takes about a minute.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import psutil
import repository  # noqa: F401
from programs import Program, free_port, run, warm_started_model
from report import Report

from environments.errors import ConfigError
from launch.fault_injection.fault import send_signal
from launch.run_folder.checkpoint import STATE, CheckpointFolder
from launch.run_folder.consumed_log import read_consumed_log

REPLACED = ("replica", "actor", "sampler", "controller", "proxy")
"""Roles whose processes are replaced, so that the run goes on."""
ENDING = ("driver", "learner", "queue", "fleet", "store", "directory", "raylet", "gcs")
"""Roles without which the run ends, or goes on from its newest checkpoint:"""
RECOVERED = ("learner", "queue", "fleet", "store", "directory")
IN_COPY = "driver in copy"


def _copies(folder: Path) -> Path:
    """Address of the copies of a run's checkpoints."""
    return folder.with_name(f"{folder.name}-copies")


def _copies_half(_: Program, folder: Path) -> bool:
    """Whether the newest copy of a checkpoint is not whole, and one before it is."""
    are_whole = [(each / STATE).exists() for each in sorted(_copies(folder).glob("step_*"))]
    return any(are_whole) and not are_whole[-1]


DURING: dict[str, Callable[[Program, Path], bool]] = {
    "driver in warm start": lambda program, _: any("warm start" in line for line in program.lines),
    "driver in checkpoint": lambda _, folder: any(folder.glob("checkpoints/.step_*.tmp")),
    IN_COPY: _copies_half,
    "driver in publish": lambda _, folder: any(folder.glob("weights_training/.unfinished-*")),
}
"""Strikes at the driver at a moment that it can be seen to have reached."""
KINDS = (*DURING, *ENDING, *REPLACED)
STEPS_PER_MOMENT = 6
"""Updates of a run for each strike: three before it at most, and two or three until it is seen to go on."""
RUN = [
    "recipe=calculator",
    "run.resume=true",
    "run.checkpoints.every=2",
    "warm_start.num_steps=30",
    "server.weights.transport=files",  # whose folder shows when weights are published
    "evaluation.num_tasks=8",
    "rollout.groups_per_step=3",
    "rollout.group_size=4",
    "fleet.num_actors=4",
    "learner.mini_batch_size=6",
    "algorithm.zero_signal_groups=keep",  # where there is staleness, which groups have none is chance
    "algorithm.entropy_coef=0.01",  # so that there is a gradient in every group
]
START_SECONDS = 120.0
"""What a run gets to report its first update, or the next one after it has lost a process."""
MOST_SECONDS = {"gcs": 90.0}
"""What a run gets to end by its own error, where that is not ``USUAL_SECONDS``: Ray's own patience."""
USUAL_SECONDS = 10.0


@dataclass(frozen=True)
class Moment:
    """When to strike: this long after the given update of the present program, 0 being its start."""

    kind: str
    step: int
    seconds: float
    goes_on: bool
    """Whether the run has to."""

    @property
    def role(self) -> str:
        return "driver" if self.kind in DURING else self.kind


@dataclass(frozen=True)
class Outcome:
    """What became of a program after a strike."""

    moment: Moment
    at_step: int
    status: int | None
    """Its exit status; None if it went on, or hung."""
    seconds: float
    """Until it ended, or until the next update."""
    num_left: int
    """Processes that had to be killed afterwards."""
    said: str

    @property
    def is_over(self) -> bool:
        """Whether the program is to be started again: it has ended, or will never."""
        return self.status is not None or not self.moment.goes_on

    @property
    def is_fine(self) -> bool:
        if self.moment.goes_on and (self.status is None or self.moment.step):
            return self.status is None  # while a run starts, it may end too
        in_time = self.seconds <= MOST_SECONDS.get(self.moment.role, USUAL_SECONDS)
        return self.status is not None and in_time and not self.num_left


def moments(kinds: Sequence[str], rng: random.Random, recovers: bool) -> list[Moment]:
    """A strike of each kind, in an order by chance; one in five comes while the run starts."""
    order = list(kinds)
    rng.shuffle(order)
    order.sort(key=lambda kind: kind != "driver in warm start")  # later there is none any more
    lasting = {*REPLACED, *(RECOVERED if recovers else ())}
    return [
        Moment(kind, 0, 0.0, goes_on=False)
        if kind == "driver in warm start"
        else Moment(kind, 0, rng.uniform(0.0, 20.0), kind in lasting)
        if rng.random() < 0.2 and kind not in DURING
        else Moment(kind, rng.randint(1, 3), rng.uniform(0.0, 1.5), kind in lasting)
        for kind in order
    ]


def harry(overrides: Sequence[str], folder: Path, plan: Sequence[Moment]) -> list[Outcome]:
    """Run to the end, with a strike at each moment, resumed after each that has ended the run."""
    outcomes: list[Outcome] = []
    waiting = list(plan)
    if any(each.kind == IN_COPY for each in plan):
        overrides = [*overrides, f"run.checkpoints.to={_copies(folder)}"]
    while True:
        if outcomes and outcomes[-1].moment.kind == IN_COPY:
            shutil.rmtree(folder)
        program = Program([*overrides, f"run.directory={folder}"])
        try:
            if _strike_until_it_ends(program, folder, waiting, outcomes):
                continue
            _wait_for_step(program, sys.maxsize)
            if program.wait(START_SECONDS):
                sys.exit("\n".join([*program.lines, "The run failed, and nobody had touched it."]))
            if waiting:
                sys.exit(f"The run ended before {len(waiting)} of the strikes.")
            return outcomes
        finally:
            program.end()


def _strike_until_it_ends(
    program: Program, folder: Path, waiting: list[Moment], outcomes: list[Outcome]
) -> bool:
    """Return whether a strike has ended ``program``, rather than that there was none left for it."""
    reported = 0
    while waiting and _wait_for_step(program, reported + waiting[0].step):
        outcome = _strike(program, folder, waiting[0])
        if outcome.status == 0:  # it had ended by itself
            return False
        waiting.pop(0)
        outcomes.append(outcome)
        print(outcome, flush=True)
        if outcome.is_over:
            return True
        reported = program.num_steps()
    return False


def _wait_for_step(program: Program, step: int) -> bool:
    """Wait until ``program`` has reported ``step`` updates; False if it ends first."""
    deadline = time.monotonic() + START_SECONDS
    reported = program.num_steps()
    while program.is_alive and program.num_steps() < step:
        program.family()
        time.sleep(0.05)
        if program.num_steps() > reported:
            reported, deadline = program.num_steps(), time.monotonic() + START_SECONDS
        if time.monotonic() > deadline:
            sys.exit("\n".join([*program.lines, f"No update was made for {START_SECONDS:g} s."]))
    return program.is_alive


def _strike(program: Program, folder: Path, moment: Moment) -> Outcome:
    time.sleep(moment.seconds)
    if moment.kind in DURING:
        program.family()
        while program.is_alive and not _stopped_during(moment.kind, program, folder):
            time.sleep(0.0005)  # a slice of the driver's time: some moments last for four milliseconds
    while program.is_alive:
        try:
            send_signal(moment.role, SIGKILL, program.process.pid, random.Random(0))
            break
        except ConfigError:  # it has not started yet
            program.family()
            time.sleep(0.05)
    start, at_step = time.monotonic(), program.num_steps()
    if moment.goes_on:
        goes_on = _wait_for_step(program, at_step + 2)  # the first one may have been under way
        status = None if goes_on else program.process.wait()
        seconds, num_left = time.monotonic() - start, 0
    else:
        status = program.wait(START_SECONDS)
        # The others are to be gone too: a resumed run would have to share the machine with them.
        psutil.wait_procs(program.family(), timeout=2 * USUAL_SECONDS)
        seconds, num_left = time.monotonic() - start, program.end()
        if (newest := CheckpointFolder(folder, kept=1).latest()) is not None:
            CheckpointFolder.progress(newest)  # the newest one that is named is whole, whatever was cut off
    said = "" if status is None else next((line for line in reversed(program.lines) if "Error" in line), "")
    return Outcome(moment, at_step, status, seconds, num_left, said[:100])


def _stopped_during(kind: str, program: Program, folder: Path) -> bool:
    """Stop the driver; return whether that is in a moment of ``DURING``, and let it go on otherwise."""
    program.process.send_signal(SIGSTOP)
    is_in_time = DURING[kind](program, folder)
    if not is_in_time:
        program.process.send_signal(SIGCONT)
    return is_in_time


# -- what both runs have come to -------------------------------------------------------------------------


def compare(undisturbed: Path, harried: Path, bits: bool) -> list[str]:
    """What differs, as sentences."""
    expected, found = _consumed(undisturbed), _consumed(harried)
    faults = []
    if lost := expected - found:
        faults.append(f"lost: {sorted(lost)[:5]} and {lost.total()} in all")
    if extra := found - expected:
        faults.append(f"too many: {sorted(extra)[:5]} and {extra.total()} in all")
    if bits and (names := _different_weights(undisturbed, harried)):
        faults.append(f"{len(names)} tensors differ, such as {names[0]}")
    return faults


def _consumed(directory: Path) -> Counter[str]:
    """How often each rollout was consumed; the way of consumption is part of the name."""
    counts: Counter[str] = Counter()
    for record in read_consumed_log(directory):
        counts.update(f"step {record['step']} trained {each}" for each in record["trained"])
        for reason, dropped in record["dropped"].items():
            counts.update(f"step {record['step']} dropped ({reason}) {each}" for each in dropped)
    return counts


def _different_weights(one: Path, other: Path) -> list[str]:
    import torch

    mine, its = _weights(one), _weights(other)
    return [name for name in mine if not torch.equal(mine[name], its[name])]


def _weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    checkpoint = CheckpointFolder(directory, kept=1).latest()
    assert checkpoint is not None
    files = (checkpoint / "huggingface").glob("*.safetensors")  # one of each rank
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of strikes; one may come several times")
    parser.add_argument("--staleness", default="0,2", help="values of rollout.max_staleness")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    parser.add_argument("--recover", action="store_true", help="let the run recover: run.max_recoveries=100")
    parser.add_argument("overrides", nargs="*", help="for both runs, such as learner.num_workers=2")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := sorted({*kinds} - {*KINDS}):
        parser.error(f"--kinds: {unknown[0]!r} is none of {', '.join(KINDS)}")
    report = Report(
        f"chaos: {len(kinds)} strikes by SIGKILL for each staleness, seed {arguments.seed}",
        ("struck", "staleness", "after update", "the run", "seconds", "as it should", "it said"),
    )
    faults = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        model = warm_started_model("calculator", folder, num_steps=100)
        for staleness in arguments.staleness.split(","):
            overrides = [*RUN, f"model.path={model}", f"rollout.max_staleness={staleness}"]
            overrides.append(f"run.num_steps={STEPS_PER_MOMENT * len(kinds)}")
            overrides.append(f"server.http_port={free_port()}")  # else there is no proxy
            overrides.append(f"run.max_recoveries={100 if arguments.recover else 0}")
            overrides += arguments.overrides
            undisturbed, harried = (
                folder / f"undisturbed-{staleness}",
                folder / f"harried-{staleness}-{arguments.seed}",
            )
            run([*overrides, f"run.directory={undisturbed}"])
            plan = moments(kinds, random.Random(arguments.seed), arguments.recover)
            for each in harry(overrides, harried, plan):
                ended = f"ended ({each.status})" if each.status is not None else "goes on"
                ended = "hangs" if each.is_over and each.status is None else ended
                fine = "yes" if each.is_fine else f"NO ({each.num_left} left)"
                figures = str(each.at_step), ended, f"{each.seconds:.1f}", fine, each.said
                report.add(each.moment.kind, staleness, *figures)
            faults += [
                f"max_staleness={staleness}: {fault}"
                for fault in compare(undisturbed, harried, bits=staleness == "0")
            ]
    report.print()
    print("\n".join(faults) if faults else "Consumed rollouts and, with max_staleness=0, weights are equal.")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
