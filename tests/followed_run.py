"""A training as a program on a cluster whose nodes come and go, followed by its folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ray

from launch.fault_injection.storm import num_updates
from launch.reporting.audit import audit, read_run

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
"""Exit status of a run that Ctrl-C has ended."""
SMALL = (
    "recipe=calculator",
    "run.num_steps=1000",  # it is interrupted
    "run.stall_limit_seconds=500",
    "warm_start.num_steps=0",
    "evaluation.num_tasks=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_staleness=1",
    "learner.mini_batch_size=8",
    # Rollout actors live on nodes for them, engine and learner on the head.
    "fleet.nodes={CPU: 1, pairs: 0.01}",
    "server.nodes={head: 0.01}",
    "learner.nodes={learner: 0.01}",
)
"""A run that makes an update in a second or two."""
SCRIPTED = (
    "server.engine.name=scripted_engine:ScriptedEngine",
    "server.engine.options={replies: ['What is it? I think 12.'], seconds_per_token: 0.05}",
    "learner.mismatch_alarm=1e9",  # the script knows no model
)
"""Of a run whose engine is not what a test is about: it starts soon, and takes little of the machine."""
HEAD, NODE = {"head": 1, "learner": 1}, {"pairs": 1}
"""Resources of the nodes."""


OWN_LINE = re.compile(r"\[ *[\d.]+ s\] \S|[█░]{10} \S|  +\S|Interrupted|$")
"""The forms of a line that a training prints: an event, progress, more about the line above, Ctrl-C."""


def foreign_lines(said: str) -> list[str]:
    """Lines in the output of a training in which libraries have their say."""
    return [line for line in said.splitlines() if not OWN_LINE.match(line)]


def num_nodes() -> int:
    """Nodes of the cluster that live."""
    return sum(node["Alive"] for node in ray.nodes())


class FollowedRun:
    """``python -m launch.train`` with ``SMALL`` and ``overrides``, on the cluster that RAY_ADDRESS names."""

    def __init__(self, directory: Path, overrides: Sequence[str]) -> None:
        self.directory = directory
        self._said = directory.with_suffix(".txt")
        settings = [*SMALL, *overrides, f"run.directory={directory}"]
        with open(self._said, "w") as said:
            command = [sys.executable, "-u", "-m", "launch.train", *settings]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._said.read_text()

    @property
    def num_updates(self) -> int:
        """Updates that its folder knows of."""
        return num_updates(self.directory)

    def wait_until(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        """Return when ``reached``; end this program if that takes longer, or the run ends before."""
        start = time.monotonic()
        while not reached():
            has_ended = self.process.poll() not in (None, INTERRUPTED)
            if has_ended or time.monotonic() > start + seconds:
                self.process.kill()
                why = f"Ended with {self.process.returncode}" if has_ended else f"Not within {seconds:g} s"
                sys.exit(f"{self.said}\n{why}: {what}; {num_nodes()} nodes.")
            time.sleep(0.2)
        print(f"{what}: after {time.monotonic() - start:.1f} s", flush=True)

    def wait_for_updates(self, count: int, seconds: float = 240) -> None:
        """Return when it has made ``count`` updates more."""
        wanted = self.num_updates + count
        self.wait_until(lambda: self.num_updates >= wanted, seconds, f"{count} updates more")

    def interrupt(self) -> None:
        """End it by Ctrl-C, and check that it has used each rollout once, lost none, and kept its bounds."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(240) == INTERRUPTED, self.said
        findings = audit(read_run(self.directory))
        assert all(finding.is_sound for finding in findings), findings
