"""Faults of processes: they are killed, stopped, slowed down, or cut off with their node."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from actors.timing import NODE_CUT_SECONDS
from environments.errors import ConfigError
from launch.health.members import Member, members

KILL, STOP, SLOW, CUT = "kill", "stop", "slow", "cut"
FAULT_KINDS = (KILL, STOP, SLOW)
"""Faults of a process of any role. A node other than this can also be cut off, by a fault of its raylet."""
STOP_SECONDS = 3.0
"""Seconds that a process is stopped."""
SLOW_SECONDS, SLICE_SECONDS = 4.0, 0.2
"""Seconds that a process is slowed down: it is stopped and goes on in turns, each of one slice."""


@dataclass(frozen=True)
class Fault:
    """Something that is done to one process: its kind, and the process."""

    kind: str
    member: Member

    def __str__(self) -> str:
        how = {
            KILL: "killed (SIGKILL)",
            STOP: f"stopped for {STOP_SECONDS:g} s",
            SLOW: f"slowed down for {SLOW_SECONDS:g} s",
            CUT: f"cut off for {NODE_CUT_SECONDS:g} s, with all of its node",
        }
        where = f" of node {self.member.node[:8]}" if self.member.node else ""
        return f"{self.member.role} {self.member.pid}{where} {how[self.kind]}"

    def inject(self) -> None:
        """Inject it on this node; return when it is over. A process that ends meanwhile is left alone."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.member.pid)
            if self.kind == KILL:
                process.kill()
            elif self.kind == STOP:
                _pause([process], STOP_SECONDS)
            elif self.kind == CUT:
                tree = [process, *process.children(recursive=True)]
                _pause([each for each in tree if each.pid != os.getpid()], NODE_CUT_SECONDS)
            else:
                end = time.monotonic() + SLOW_SECONDS
                while time.monotonic() < end:
                    _pause([process], SLICE_SECONDS)
                    time.sleep(SLICE_SECONDS)


def _pause(processes: Sequence[psutil.Process], seconds: float) -> None:
    try:
        _for_all(processes, psutil.Process.suspend)
        time.sleep(seconds)
    finally:
        _for_all(processes, psutil.Process.resume)


def _for_all(processes: Sequence[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            action(process)


def choose_member(present: Sequence[Member], role: str, rng: random.Random) -> Member:
    """Draw one of the members of ``role``. Raises ``ConfigError`` if there is none."""
    candidates = [member for member in present if member.role == role]
    if not candidates:
        running = ", ".join(sorted({member.role for member in present})) or "nothing of Troupe's"
        raise ConfigError(f"There is no {role} below that process on this node; there is: {running}.")
    return rng.choice(candidates)


def send_signal(role: str, signal_number: signal.Signals, below: int, rng: random.Random) -> Member:
    """Send a signal to one process of ``role``, ``below`` or one of its descendants; return which it was.

    Raises:
        ConfigError: there is no such process.
    """
    member = choose_member(members(below), role, rng)
    try:
        psutil.Process(member.pid).send_signal(signal_number)
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"The {role} {member.pid} has just ended by itself: try again.") from error
    return member
