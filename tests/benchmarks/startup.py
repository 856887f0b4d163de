"""Seconds until a fresh run learns and plays, and seconds per update by stage.

    python tests/benchmarks/startup.py [overrides of launch.train]

Runs the calculator recipe for ten updates, as a user would, and reads its terminal and its metrics. Meanwhile
it asks the policy server until it answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import repository
from programs import free_port
from report import Report

from actors.settings import MODEL_NAME
from launch.reporting.tracker import read_metrics

COMMAND = ("-m", "launch.train", "recipe=calculator", "run.num_steps=10", "evaluation.num_tasks=16")
MOMENTS = {
    "first steps of the warm start (5)": "warm start    5/",
    "a tenth of the warm start (35 steps)": "warm start   35/",
    "rollouts begin, after the warm start": "Policy server:",
    "first rollouts are in (evaluation)": "held-out reward after step 0",
    "first update": "step    1/",
}
"""What is reached, and what the line says that tells it."""


class FirstAnswer(threading.Thread):
    """Asks a policy server twice a second for a token, until it has sampled one."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.seconds: float | None = None
        """From the start of this thread to the answer."""
        body = {"model": MODEL_NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "1"}]}
        self._request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )

    def run(self) -> None:
        start = time.perf_counter()
        while self.seconds is None:
            with suppress(OSError), urllib.request.urlopen(self._request) as answer:
                json.load(answer)
                self.seconds = time.perf_counter() - start
            time.sleep(0.5)


def main() -> None:
    report = Report("startup: seconds from the command", ("moment", "seconds"))
    with tempfile.TemporaryDirectory() as folder:
        start, port = time.perf_counter(), free_port()
        first_answer = FirstAnswer(port)
        first_answer.start()
        settings = [f"run.directory={folder}", f"server.http_port={port}", *sys.argv[1:]]
        process = subprocess.Popen(
            [sys.executable, "-u", *COMMAND, *settings],
            cwd=repository.ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        waiting = dict(MOMENTS)
        assert process.stdout is not None
        for line in process.stdout:
            seconds = time.perf_counter() - start
            for moment in [moment for moment, mark in waiting.items() if mark in line]:
                report.add(moment, f"{seconds:.1f}")
                del waiting[moment]
        if process.wait():
            sys.exit(f"The run failed with status {process.returncode}: its error stands above.")
        assert first_answer.seconds is not None, "the policy server has never answered"
        report.add("the policy server answers a client", f"{first_answer.seconds:.1f}")
        report.add("the command ends", f"{time.perf_counter() - start:.1f}")
        steps = [record for record in read_metrics(Path(folder)) if "time/step" in record]
    report.print()
    stages = Report("an update: mean seconds, and shares of its time", ("metric", "mean"))
    for stage in sorted(name for name in steps[0] if name.startswith("time/")):
        stages.add(stage, f"{sum(step[stage] for step in steps) / len(steps):.2f}")
    in_turns = [step for step in steps[1:] if step["time/evaluate"] < 0.01]
    stages.add("share of time/wait in which the engine idles", f"{idle_while_waiting(in_turns):.2f}")
    stages.print()


def idle_while_waiting(steps: Sequence[Mapping[str, float]]) -> float:
    """Share of the time for which the learner waits for rollouts, in which the engine computes nothing."""
    busy = sum((1 - step["time/engine_idle"]) * step["time/step"] for step in steps)
    return 1 - busy / sum(step["time/wait"] for step in steps)


if __name__ == "__main__":
    main()
