"""A training on three hosts of which one is cut off; later one joins, and one drains and leaves.

    python tests/benchmarks/three_hosts.py [--folder runs/hosts] [--seeds 0,1,2] [--plot hosts.png]

The hosts are network namespaces of this machine (``hosts.py``), so it needs root. The head has the program,
the engine and the learner; two hosts have room for half of the pairs each. The one that joins replaces the
one that was cut off; when another one leaves, half of the pairs have no room again. They play the guess
recipe, with a pause before each answer, so that pairs are what rollouts are short of.

When and where each turn was played is in the trajectories that the run keeps. Throughput is counted in turns:
a rollout has fewer of them the better the policy plays. With --seeds the same training runs undisturbed too,
for the learning curves. A run takes about four minutes, each of the seeds two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import HOST, Network
from programs import Program, run, warm_started_model

from environments.text_games import GuessEnvironment
from launch.chaos import COUNTED
from launch.recipes import guess
from launch.reporting.audit import CHECKS, SCORE, Finding, is_complete, read_run
from launch.reporting.tracker import read_metrics
from launch.run_folder.trajectory_log import TRAIN, kept_steps, read_kept, trajectory_path
from launch.workload import Workload

HEAD, STAYS, CUT_OFF, JOINS = "head", "host2", "host3", "host4"
PAUSE_SECONDS = 0.3
PAIRS_PER_HOST = 6
RUN = [
    "recipe=guess",
    "workload=three_hosts",
    "warm_start.num_steps=0",
    "run.trajectories_kept=1000",
    "run.checkpoints.every=1000",
    "rollout.max_staleness=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=8",
    "learner.mini_batch_size=16",
    f"fleet.num_actors={2 * PAIRS_PER_HOST}",
]
PLACES = [
    "fleet.nodes={CPU: 1, role: pairs}",
    "server.nodes={role: head}",
    "learner.nodes={role: head}",
]
BEFORE, ALONE, JOINED, DRAIN, AFTER = 20, 20, 55, 20, 10
"""Seconds: until the cut, until the join, until the drain, until the host is switched off, until the end."""
START_SECONDS, END_SECONDS = 150.0, 240.0
"""For the first update, and from the last event until the end of the run."""
MOST_STALL, BACK, BACK_SECONDS = 10.0, 0.9, 20.0
USUAL, WINDOW = 15.0, 10.0
"""Seconds over which throughput is measured: before the cut, and until it is back."""


# -- the workload ----------------------------------------------------------------------------------------


class PacedGuess(GuessEnvironment):
    """The game with a pause before each answer. Info says when and where it was given. Held-out games have no
    pause."""

    pause = PAUSE_SECONDS

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(self.pause)
        observation, reward, done, info = super().step(action)
        return observation, reward, done, info | {"time": time.time(), "host": os.environ.get(HOST, HEAD)}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> PacedGuess:
        env = super().from_dict(info)
        env.pause = 0.0 if "secret" in info else PAUSE_SECONDS
        return env


def workload(seed: int) -> Workload:
    """The guess recipe's, at a pace."""
    return replace(guess.workload(seed), env_class=PacedGuess)


# -- the events ------------------------------------------------------------------------------------------


@dataclass
class Events:
    """What happened to the hosts, by ``time.time()``."""

    times: dict[str, float] = field(default_factory=dict)

    def note(self, name: str) -> None:
        self.times[name] = time.time()
        first = min(self.times.values())
        print(f"[{self.times[name] - first:6.1f} s] {name}", flush=True)

    def write(self, directory: Path) -> None:
        (directory / EVENTS).write_text(json.dumps(self.times), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Events:
        return cls(json.loads((directory / EVENTS).read_text(encoding="utf-8")))


EVENTS = "hosts.json"


CUT, STARTING, JOIN, DRAINING, OFF = (
    f"{CUT_OFF} is cut off",
    f"{JOINS} is started",
    f"{JOINS} has joined",
    f"{STAYS} drains",
    f"{STAYS} is switched off",
)
FIRST = "the first update"


def disturb(network: Network, overrides: Sequence[str], folder: Path, directory: Path) -> Events:
    """Train on the hosts while they come and go, to the end of the run."""
    events = Events()
    pairs = [f"--num-cpus={PAIRS_PER_HOST}", "--labels=role=pairs"]
    network.add(HEAD, "--num-cpus=2", "--labels=role=head")
    network.add(STAYS, *pairs)
    network.add(CUT_OFF, *pairs)
    settings = [*overrides, *PLACES, f"run.directory={directory}"]
    program = Program(settings, network.environment(HEAD), before=network.on(HEAD))
    try:
        _wait(lambda: bool(kept_steps(directory, TRAIN)), START_SECONDS, program, "made no update")
        events.note(FIRST)
        time.sleep(BEFORE)
        network.unplug(CUT_OFF)
        events.note(CUT)
        time.sleep(ALONE)
        events.note(STARTING)
        network.add(JOINS, *pairs)
        events.note(JOIN)
        time.sleep(JOINED)
        network.drain(STAYS, DRAIN)
        events.note(DRAINING)
        time.sleep(DRAIN)
        network.end(STAYS)
        events.note(OFF)
        time.sleep(AFTER)
        if not program.is_alive:
            fail(program, "ended before the last event: raise --updates")
        _wait(lambda: not program.is_alive, END_SECONDS, program, "did not end")
        if program.process.returncode:
            fail(program, "failed")
    finally:
        (folder / "output.txt").write_text("\n".join(program.lines), encoding="utf-8")
    return events


def _wait(done: Callable[[], bool], seconds: float, program: Program, fault: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline or not (program.is_alive or done()):
            fail(program, fault)
        time.sleep(0.2)


def fail(program: Program, fault: str) -> None:
    """End this program with what the run has said."""
    sys.exit("\n".join([*program.lines, f"The run {fault}."]))


# -- what the run's folder tells -------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """When and on which host the turns of all consumed rollouts were played, and when updates were made."""

    turns: list[tuple[float, str]]
    updates: list[float]

    def rate(self, start: float, end: float, host: str | None = None) -> float:
        """Turns a second between two moments."""
        inside = (start <= moment < end and host in (None, where) for moment, where in self.turns)
        return sum(inside) / (end - start)

    def back_after(self, start: float, rate: float) -> float:
        """Seconds after ``start`` at which a window begins that has ``rate``; infinite if there is none."""
        last = self.turns[-1][0] - WINDOW
        for tenth in range(max(0, int(10 * (last - start)))):
            if self.rate(start + tenth / 10, start + tenth / 10 + WINDOW) >= rate:
                return tenth / 10
        return float("inf")


def read_course(directory: Path) -> Course:
    """The course of the run in ``directory``."""
    turns, updates = [], []
    for step in kept_steps(directory, TRAIN):
        updates.append(trajectory_path(directory, TRAIN, step).stat().st_mtime)
        for kept in read_kept(directory, TRAIN, step):
            turns += [(float(each.info["time"]), str(each.info["host"])) for each in kept.trajectory.steps]
    return Course(sorted(turns), updates)


def longest_gap(moments: Sequence[float]) -> tuple[float, float]:
    """The most seconds between two moments, and when they began."""
    return max((after - before, before) for before, after in pairwise(moments))


def judge(course: Course, events: Events, directory: Path) -> list[Finding]:
    """What the issue asks for, and what was seen."""
    records = read_run(directory)
    findings = [check(records) for check in (*CHECKS, is_complete)]
    start = events.times[FIRST]
    played = [moment for moment, _ in course.turns if moment >= start]
    for name, moments in {"an update": course.updates, "a turn": played}.items():
        seconds, when = longest_gap(moments)
        text = f"the longest time without {name} was {seconds:.1f} s, from {when - start:.1f} s on"
        findings.append(Finding(seconds <= MOST_STALL, text))
    before = course.rate(events.times[CUT] - USUAL, events.times[CUT])
    for name in (STARTING, JOIN):
        seconds = course.back_after(events.times[name], BACK * before)
        text = f'throughput was back at {BACK:.0%} {seconds:.1f} s after "{name}"'
        findings.append(Finding(seconds <= BACK_SECONDS, text))
    return findings


def print_throughput(course: Course, events: Events) -> None:
    """A table of what the hosts have played between the events."""
    at = events.times
    spans = {
        "before the cut": (at[CUT] - USUAL, at[CUT]),
        "first 10 s after it": (at[CUT], at[CUT] + WINDOW),
        "then, until the join": (at[CUT] + WINDOW, at[STARTING]),
        "first 10 s after the join": (at[JOIN], at[JOIN] + WINDOW),
        "then, until the drain": (at[JOIN] + WINDOW, at[DRAINING]),
        "from 10 s after the drain": (at[DRAINING] + WINDOW, at[OFF] + AFTER),
    }
    before = course.rate(*spans["before the cut"])
    print(f"\n{'turns a second':26}" + "".join(map("{:>11}".format, ("in all", "of before", *HOSTS))))
    for name, span in spans.items():
        in_all, *by_host = (course.rate(*span, host) for host in (None, *HOSTS))
        print(f"{name:26}{in_all:11.1f}{in_all / before:11.0%}" + "".join(map("{:11.1f}".format, by_host)))
    print()


HOSTS = (STAYS, CUT_OFF, JOINS)


# -- learning curves -------------------------------------------------------------------------------------


def curve(directory: Path, width: int = 5) -> list[float]:
    """The mean reward of the rollouts over the updates: of each, and of those just before it."""
    rewards = [
        each["rollout/reward_mean"] for each in read_metrics(directory) if "rollout/reward_mean" in each
    ]
    return [statistics.fmean(rewards[max(0, end - width) : end]) for end in range(1, len(rewards) + 1)]


def judge_curve(directory: Path, undisturbed: Sequence[Path]) -> list[Finding]:
    """Whether a run has learned as the others have."""
    findings = []
    own, others = curve(directory), [curve(each) for each in undisturbed]
    spread = list(zip(*others, strict=True))
    inside = sum(min(seeds) <= value <= max(seeds) for value, seeds in zip(own, spread, strict=True))
    differs = statistics.fmean(own) - statistics.fmean(map(statistics.fmean, others))
    seeds = [statistics.fmean(each) for each in others]
    text = (
        f"the mean reward of all updates is {statistics.fmean(own):.3f}, of the seeds {min(seeds):.3f} to "
        f"{max(seeds):.3f} (difference from their mean {differs:+.3f}); {inside} of {len(own)} points of the "
        "curve are within the seeds' spread"
    )
    findings.append(Finding(min(seeds) <= statistics.fmean(own) <= max(seeds), text))
    own_score, scores = _score(directory), sorted(map(_score, undisturbed))
    text = f"held-out success is {own_score:.3f}, of the seeds {scores[0]:.3f} to {scores[-1]:.3f}"
    findings.append(Finding(scores[0] <= own_score <= scores[-1], text))
    return findings


def _score(directory: Path) -> float:
    return float([each[SCORE] for each in read_metrics(directory) if SCORE in each][-1])


# -- the plot --------------------------------------------------------------------------------------------


def draw(course: Course, events: Events, directory: Path, undisturbed: Sequence[Path], path: Path) -> None:
    """Throughput by host over time with the events; below it the learning curve and those of the seeds."""
    from matplotlib.figure import Figure

    start, width = events.times[FIRST], 4.0
    moments = [start + half / 2 for half in range(int(2 * (course.updates[-1] - start - width)))]
    figure = Figure(figsize=(7.5, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[1.5, 1.0])
    rates = [[course.rate(each, each + width, host) for each in moments] for host in HOSTS]
    above.stackplot(
        [each + width / 2 - start for each in moments], rates, labels=HOSTS, alpha=0.8,
        colors=("#4c78a8", "#e45756", "#54a24b"),
    )  # fmt: skip
    before = course.rate(events.times[CUT] - USUAL, events.times[CUT])
    label = f"{BACK:.0%} of before the cut"
    above.axhline(BACK * before, color="black", linestyle="--", linewidth=1, label=label)
    top = 1.25 * before
    for name in (CUT, JOIN, DRAINING, OFF):
        above.axvline(events.times[name] - start, color="black", linewidth=1)
        above.text(events.times[name] - start + 1, top, name, rotation=90, va="top", fontsize="x-small")
    above.set(xlabel="seconds since the first update", ylabel="turns a second", ylim=(0, 1.3 * before))
    above.legend(loc="lower right", fontsize="x-small")
    if undisturbed:
        seeds = list(zip(*map(curve, undisturbed), strict=True))
        low, high = [min(each) for each in seeds], [max(each) for each in seeds]
        steps = range(1, len(seeds) + 1)
        label = f"{len(undisturbed)} seeds, undisturbed"
        below.fill_between(steps, low, high, color="gray", alpha=0.35, linewidth=0, label=label)
    own = curve(directory)
    below.plot(range(1, len(own) + 1), own, color="#4c78a8", label="this run")
    below.set(xlabel="policy updates", ylabel="reward, mean of 5", ylim=(0.3, 1.03))
    below.legend(loc="lower right", fontsize="x-small")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and use those that are there")
    parser.add_argument("--updates", type=int, default=75, help="of each run; it must outlive the events")
    parser.add_argument("--seed", type=int, default=0, help="of the run on the hosts")
    parser.add_argument("--seeds", default="", help="of undisturbed runs, such as 0,1,2")
    parser.add_argument("--run", type=Path, help="folder of such a run: look at it again, and make none")
    parser.add_argument("--plot", type=Path, help="file to draw to")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))  # what was started is ended
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        directory = arguments.run or make_run(arguments, folder)
        undisturbed = [folder / f"undisturbed-{seed}" for seed in filter(None, arguments.seeds.split(","))]
        num_faults = report(directory, undisturbed, arguments.plot)
    sys.exit(bool(num_faults))


def make_run(arguments: argparse.Namespace, folder: Path) -> Path:
    """Make the runs that are asked for and not there; return the folder of the one on the hosts."""
    with Network(folder) as network:
        model = warm_started_model("guess", folder, num_steps=250)
        overrides = [*RUN, f"model.path={model}", f"run.num_steps={arguments.updates}"]
        for seed in filter(None, arguments.seeds.split(",")):
            undisturbed = folder / f"undisturbed-{seed}"
            if not (undisturbed / "checkpoints" / "latest").exists():
                run([*overrides, f"seed={seed}", f"run.directory={undisturbed}"])
        directory = folder / f"hosts-{time.strftime('%H%M%S')}"
        events = disturb(network, [*overrides, f"seed={arguments.seed}"], folder, directory)
    events.write(directory)
    return directory


def report(directory: Path, undisturbed: Sequence[Path], plot: Path | None) -> int:
    """Print and draw; return how many checks have failed."""
    events, course = Events.read(directory), read_course(directory)
    print_throughput(course, events)
    for name in COUNTED:
        print(f"{name}: {sum(each.get(name, 0) for each in read_metrics(directory)):g}")
    findings = judge(course, events, directory)
    if undisturbed:
        findings += judge_curve(directory, undisturbed)
    for finding in findings:
        print(f"{'sound ' if finding.is_sound else 'BROKEN'} {finding.text}")
    if plot:
        draw(course, events, directory, undisturbed, plot)
    return sum(not finding.is_sound for finding in findings)


if __name__ == "__main__":
    main()
