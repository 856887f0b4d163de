"""Heartbeat of a run from its first second on, and the watchdog that notices when nothing moves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from actors.rollouts.service import RolloutService
from launch.health.heartbeat import HeartbeatSender, RunHeartbeat
from launch.health.inspection import inspect, raylets_here
from launch.health.interrupt import Interrupts
from launch.health.run_report import report_text
from launch.health.watchdog import Watchdog
from launch.reporting.tracker import Tracker
from launch.settings.tree import TrainConfig
from launch.training.activity import Activity
from launch.training.run_state import RunState

REPORT_SECONDS = 120.0
"""Seconds without any movement after which a run prints what it waits for, where it has no limit."""
REPORTS_BEFORE_LIMIT = 30
"""Part of its limit after which it prints that: 120 s of the usual hour."""


def run_name(state: RunState) -> str:
    """Name of the run for other programs of its cluster."""
    return f"the run {state.directory.resolve()} (process {os.getpid()} on {socket.gethostname()})"


def present_heartbeat(
    state: RunState, activity: Activity, services: Sequence[RolloutService]
) -> RunHeartbeat:
    """Present activity and progress of the run. Its services may not have been started yet."""
    times = [service.stream.last_arrival for service in services]
    arrivals = [each for each in times if each is not None]
    trajectory = {"a trajectory": time.monotonic() - max(arrivals)} if arrivals else {}
    progress = trajectory | activity.seconds_since_results()
    seconds = time.monotonic() - activity.since
    return RunHeartbeat(
        folder=str(state.directory.resolve()),
        pid=os.getpid(),
        host=socket.gethostname(),
        fleets=[service.fleet_name for service in services],
        activity=activity.name,
        seconds=seconds,
        idle_seconds=min([seconds, *progress.values()]),
        num_updates=state.progress.step,
        progress=progress,
        sent_at=time.time(),
    )


def watch(
    config: TrainConfig,
    heartbeat: Callable[[], RunHeartbeat],
    sender: HeartbeatSender,
    tracker: Tracker,
    interrupts: Interrupts,
    ending: ExitStack,
) -> None:
    """Have a watchdog notice when nothing moves, until ``ending`` is closed."""
    raylets = raylets_here()
    limit_seconds = config.run.stall_limit_seconds
    watchdog = Watchdog(
        limit_seconds / REPORTS_BEFORE_LIMIT or REPORT_SECONDS,
        limit_seconds,
        lambda: heartbeat().idle_seconds,
        lambda: report_text(inspect(heartbeat())),
        tracker.announce,
        interrupts.end_with,
        sender,
        raylets[0] if len(raylets) == 1 else None,
    )
    ending.callback(watchdog.stop)
