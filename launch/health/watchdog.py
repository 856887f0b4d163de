"""Watchdog of a training: notices that nothing moves, reports why, and ends the run after a limit."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from textwrap import indent

import psutil

from actors.timing import HEAD_SILENCE_SECONDS, HEARTBEAT_SECONDS
from environments.background import in_background
from environments.errors import TroupeError
from launch.health.heartbeat import HeartbeatSender
from launch.health.members import is_alive


@dataclass
class Watchdog:
    """Watches a training from a thread, until ``stop``.

    Args:
        limit_seconds: the setting ``run.stall_limit_seconds``.
        idle_seconds: returns the seconds since anything has moved.
        report: returns what every part waits for.
        announce: prints a text among the run's lines.
        end: ends the run with an error.
        raylet: Ray's process on this node, with which all actors here die.
    """

    report_seconds: float
    limit_seconds: float
    idle_seconds: Callable[[], float]
    report: Callable[[], str]
    announce: Callable[[str], None]
    end: Callable[[Exception], None]
    sender: HeartbeatSender
    raylet: psutil.Process | None
    _stopped: threading.Event = field(default_factory=threading.Event)
    _has_reported: bool = False

    def __post_init__(self) -> None:
        in_background(self._watch, "watchdog").add_done_callback(self._end_if_failed)

    def _watch(self) -> None:
        """consumes time · waits for the next tick · produces a report for a stall, or the run's end"""
        before = time.monotonic()
        while not self._pause():
            # A driver that was stopped itself has missed what the others did.
            own_delay, before = time.monotonic() - before - HEARTBEAT_SECONDS, time.monotonic()
            if own_delay < HEARTBEAT_SECONDS and self._end_if_due():
                return

    def _pause(self) -> bool:
        """Wait for the next tick, or the end of the raylet; return whether this watchdog was stopped.

        The end is not waited for by ticks: at its next access to Ray's objects, Ray ends this process.
        """
        if self.raylet is None or not is_alive(self.raylet):
            return self._stopped.wait(HEARTBEAT_SECONDS)
        descriptor = os.pidfd_open(self.raylet.pid)
        try:
            ended = select.poll()  # select.select takes no descriptor above 1,023
            ended.register(descriptor, select.POLLIN)
            ended.poll(HEARTBEAT_SECONDS * 1000)
        finally:
            os.close(descriptor)
        return self._stopped.is_set()

    def _end_if_due(self) -> bool:
        """Act on what there is to see; return whether the run was ended."""
        silent = time.monotonic() - self.sender.last_sent
        if self.raylet is not None and not is_alive(self.raylet):
            return self._end_at_once(
                f"The raylet of this node (process {self.raylet.pid} on {socket.gethostname()}) has died, "
                "and with it all of Ray's actors here: it was killed, or the machine was short of memory."
            )
        if silent > HEAD_SILENCE_SECONDS:
            return self._end_at_once(
                f"Ray's head process (gcs_server) has not answered for {silent:.0f} s: it has died, hangs, "
                "or its node was cut off. `ray start --head` starts a new cluster."
            )
        idle = self.idle_seconds()
        if idle < self.report_seconds:
            self._has_reported = False
        elif not self._has_reported:
            self._has_reported = True
            self.announce(f"Nothing has moved for {idle:.0f} s.\n{indent(self.report(), '  ')}")
        if self.limit_seconds and idle > self.limit_seconds:
            self.end(
                TroupeError(
                    f"Nothing has moved for {idle:.0f} s, so the run ends (run.stall_limit_seconds="
                    f"{self.limit_seconds:g}). {self.report().splitlines()[-1]}"
                )
            )
            return True
        return False

    def _end_at_once(self, text: str) -> bool:
        self.announce(text)  # now: Ray may end this process before its last words
        self.end(TroupeError(text))
        return True

    def _end_if_failed(self, watch: Future[None]) -> None:
        """End the run that nobody watches any more."""
        if isinstance(error := watch.exception(), Exception):
            self.end(TroupeError(f"The watchdog of this run has failed: {type(error).__name__}: {error}"))

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
