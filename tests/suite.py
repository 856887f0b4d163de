"""Plays the tests as ``make test`` and CI do: part by part, and ends by itself where nothing moves any more.

    python tests/suite.py plain engine -k parsers    parts, and what pytest is told besides

A test that fails is played once more, alone, at the end of its part: what passes then is unsteady on a busy
machine. It is named in the last lines, for whoever sees it to mend it; more than a few fail the suite.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ENGINE, UNIT = (str(Path(__file__).with_name(folder)) for folder in ("engine", "unit"))
PARTS = {
    "fast": ["-m", "not slow and not engine and not outside", "--ignore", ENGINE],
    "plain": ["-m", "not engine and not outside", "--ignore", ENGINE],  # its files import Ray and torch
    "engine": ["-m", "engine and not outside", "--ignore", UNIT],
    "outside": ["-m", "outside", "--ignore", ENGINE],
}
"""Pytest's options for each part: the markers of its tests, and the folder that has none of them."""
MAX_UNSTEADY = 3
SILENCE_SECONDS = 600.0
"""Without a word from pytest, which writes one for every test: longer than any test takes."""
NO_TESTS = 5
"""Pytest's status where the arguments choose no test of a part."""
WORKER = "PYTEST_XDIST_WORKER"
"""Variable that pytest-xdist sets in its processes."""
RECORD = "TROUPE_SUITE_RECORD"
"""Variable that names the file for the outcome."""
# A process that crashed is not replaced: pytest-xdist would wait for the tests that it has lost.
# Files in their order: else those with a single test come last, and the longest of them alone.
SPREAD = ["--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
NUM_PROCESSES = {"fast": 3, "plain": 3, "engine": 2, "outside": 2}
"""On two cores: tests without an engine often wait for a clock or for one process that they have started."""


def main(arguments: list[str]) -> int:
    """Play the parts in their order up to the first that fails; return the exit status, 0 for success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--silence", type=float, default=SILENCE_SECONDS, metavar="SECONDS")
    options, given = parser.parse_known_args(arguments)
    unsteady: list[str] = []
    for part in options.parts:
        outcome = _play(part, [*SPREAD, f"-n{NUM_PROCESSES[part]}", *given], options.silence)
        if outcome.may_be_unsteady:
            sys.stdout.write(f"\nOnce more, alone: {', '.join(outcome.failed)}\n")
            unsteady += outcome.failed
            outcome = _play(part, outcome.failed, options.silence)
        if outcome.status not in (0, NO_TESTS):
            sys.stdout.write(f"\nThe {part} part failed: {outcome.reason}.\n")
            return 1
    if unsteady:
        sys.stdout.write("\nUnsteady: they failed beside other tests, and passed alone. Mend them next:\n")
        sys.stdout.writelines(f"  {test}\n" for test in unsteady)
    return 0


@dataclass
class Outcome:
    """How a part has ended: what the plugin of this file has written when pytest was done."""

    status: int
    failed: list[str] = field(default_factory=list)
    crashed: bool = False
    """Whether a process of pytest has died, and with it the tests that it still had to play."""
    idle_seconds: float = 0.0
    """Time at the end in which one of the processes had no test any more."""
    reason: str = ""

    @property
    def may_be_unsteady(self) -> bool:
        """Whether few tests have failed, and all the others were played."""
        return self.status == 1 and not self.crashed and 0 < len(self.failed) <= MAX_UNSTEADY


def _play(part: str, arguments: list[str], silence_seconds: float) -> Outcome:
    """Run pytest and pass on what it says."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "outcome")
        command = [sys.executable, "-m", "pytest", "-p", "suite", *PARTS[part], *arguments]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, RECORD: str(record), "PYTHONPATH": path.rstrip(os.pathsep)}
        environment.pop(WORKER, None)  # where the suite is itself under test
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            if not _pass_on(process, silence_seconds):
                _end_and_say_where(process)
                return Outcome(1, reason=f"it hung, and said nothing for {silence_seconds:g} s")
        if not record.is_file():
            return Outcome(1, reason=f"it ended with status {process.returncode}, and without a summary")
        said = json.loads(record.read_text())
    sys.stdout.write(
        f"The {part} part had a process without tests for the last {said['idle_seconds']:.0f} s.\n"
    )
    return Outcome(**said, reason=f"{len(said['failed'])} tests, pytest's status {said['status']}")


def _pass_on(process: subprocess.Popen[bytes], silence_seconds: float) -> bool:
    """Write what ``process`` says, to its end; return whether it has never been silent for too long."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    while select.select([output], [], [], silence_seconds)[0]:
        if not (said := os.read(output, 1 << 16)):
            return True
        sys.stdout.buffer.write(said)
        sys.stdout.flush()
    return False


def _end_and_say_where(process: subprocess.Popen[bytes]) -> None:
    """End pytest and all that it started. Its own processes say first where each of their threads is."""
    root = psutil.Process(process.pid)
    below = root.children(recursive=True)
    root.suspend()  # it would end the others when the first of them is gone
    for each in (*root.children(), root):  # one after the other: their words would mix
        each.send_signal(signal.SIGABRT)  # pytest has set up faulthandler, which then writes the tracebacks
        each.resume()
        _pass_on(process, silence_seconds=2)
    for each in (*below, root):
        if each.is_running():
            each.kill()


# -- the plugin: pytest runs it in its first process ------------------------------------------------------

_failed: dict[str, None] = {}
_newest: dict[str, float] = {}
"""The time of the newest report of each process of pytest-xdist."""
_crashed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the test that has failed, and the time."""
    if node := getattr(report, "node", None):
        _newest[node.gateway.id] = time.monotonic()
    if report.failed:
        _failed[report.nodeid] = None


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Keep the test in which a process of pytest-xdist has died."""
    _crashed.append(crashitem)


def pytest_sessionfinish(exitstatus: int) -> None:
    """Write how the part has ended, but in the processes of pytest-xdist."""
    if WORKER not in os.environ:
        idle_seconds = max(_newest.values(), default=0.0) - min(_newest.values(), default=0.0)
        outcome = {"status": int(exitstatus), "failed": list(_failed), "crashed": bool(_crashed)}
        outcome["idle_seconds"] = idle_seconds
        Path(os.environ[RECORD]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
