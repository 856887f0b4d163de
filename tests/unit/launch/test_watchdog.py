"""The watchdog of a training that no longer moves."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launch.health import watchdog
from launch.health.interrupt import Interrupts
from launch.health.watchdog import Watchdog


class Run:
    """A run that last moved so many seconds ago."""

    def __init__(self) -> None:
        self.idle = 0.0
        self.announced: list[str] = []
        self.ended: list[Exception] = []


@contextmanager
def watched(
    run: Run, limit: float = 0.0, head_silent: float = 0.0, raylet: psutil.Process | None = None
) -> Iterator[None]:
    sender: Any = SimpleNamespace(last_sent=time.monotonic() + 1000 if not head_silent else -head_silent)
    dog = Watchdog(
        5.0,
        limit,
        lambda: run.idle,
        lambda: "state\nThe verdict.",
        run.announced.append,
        run.ended.append,
        sender,
        raylet,
    )
    yield
    dog.stop()


def within(seconds: float, holds: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.05)


@pytest.mark.slow
def test_stall_is_reported_once_and_the_next_one_again() -> None:
    run = Run()
    with watched(run):
        run.idle = 6.0
        assert within(60, lambda: run.announced)
        time.sleep(0.3)
        assert run.announced == ["Nothing has moved for 6 s.\n  state\n  The verdict."]
        run.idle = 0.0
        time.sleep(0.3)
        run.idle = 8.0
        assert within(60, lambda: len(run.announced) == 2)
    assert run.ended == []


def test_stall_beyond_the_limit_ends_the_run_with_the_verdict() -> None:
    run = Run()
    with watched(run, limit=10.0):
        run.idle = 11.0
        assert within(60, lambda: run.ended)
    assert "run.stall_limit_seconds=10" in str(run.ended[0]) and "The verdict." in str(run.ended[0])


def test_silent_head_of_the_cluster_ends_the_run_by_its_name() -> None:
    run = Run()
    with watched(run, head_silent=30.0):
        assert within(60, lambda: run.ended)
    assert "gcs_server) has not answered" in str(run.ended[0])
    assert run.announced == [str(run.ended[0])]


@pytest.mark.slow
def test_dead_raylet_ends_the_run_by_its_name() -> None:
    run = Run()
    with subprocess.Popen(["sleep", "60"]) as raylet, watched(run, raylet=psutil.Process(raylet.pid)):
        time.sleep(0.3)
        assert run.ended == []
        raylet.kill()
        assert within(60, lambda: run.ended)
        assert f"The raylet of this node (process {raylet.pid} on" in str(run.ended[0])
    assert run.announced == [str(run.ended[0])]


def test_watchdog_that_fails_ends_the_run_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(Watchdog, "_end_if_due", lambda dog: 1 / 0)
    with watched(run):
        assert within(60, lambda: run.ended)
    assert "The watchdog of this run has failed: ZeroDivisionError" in str(run.ended[0])


@pytest.mark.slow
def test_dead_raylet_is_seen_by_a_process_of_many_open_files() -> None:
    run = Run()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        raylet = files.enter_context(subprocess.Popen(["sleep", "60"]))
        files.enter_context(watched(run, raylet=psutil.Process(raylet.pid)))
        time.sleep(0.3)
        raylet.kill()
        assert within(10, lambda: run.ended)


def test_run_that_ends_itself_leaves_whatever_it_was_doing() -> None:
    interrupts = Interrupts()
    error = RuntimeError("stalled")
    with interrupts.installed(), pytest.raises(KeyboardInterrupt), interrupts.atomic_section():
        interrupts.end_with(error)
        time.sleep(5)
        raise AssertionError("it was put off")
    assert interrupts.error is error and interrupts.was_cut
