"""A storm over a running job: its processes are killed, stopped and slowed down, chosen at random.

``launch.chaos storm`` raises one, to see whether a run keeps its promises; ``audit`` says so afterwards.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from environments.command_name import command_name
from environments.errors import ConfigError
from launch.health.members import ROLES, Member, is_alive, members
from launch.health.restart_budget import RestartBudget
from launch.reporting.audit import Finding
from launch.run_folder.checkpoint import CheckpointFolder
from launch.run_folder.consumed_log import read_consumed_log
from launch.run_folder.lock import LOCK

KILL, STOP, SLOW, CUT = "kill", "stop", "slow", "cut"
DEEDS = (KILL, STOP, SLOW)
"""Done to a process of any role. Another node can also be cut off, by a blow to its raylet."""
CUT_SECONDS = 8.0
"""For how long all processes of a node are stopped, as if its network were cut."""
CUT_PAUSE_SECONDS = 60.0
"""Between two cuts of the same node: one that stays silent for long Ray takes for dead, for good."""
STOP_SECONDS = 3.0
"""How long a process is stopped."""
SLOW_SECONDS, PULSE_SECONDS = 4.0, 0.2
"""How long a process is slowed down: it is stopped and let go on in turns, each for so long."""
ENDING = ("driver", "fleet", "queue", "store", "directory", "raylet", "gcs")
"""Roles without which a run starts all of its processes anew, or ends: they are killed only on demand."""
LEARNING = ("learner", "critic")
"""Roles that a run goes on without as often as its settings of recovery say."""
END_SECONDS = 30.0
"""What the processes of a run get to be gone once its driver is."""
CALM_SECONDS = 120.0
"""What a run gets for its next update when the storm is over."""
LOOK_SECONDS = 1.0
"""Between two looks at a run that is waited for."""


@dataclass(frozen=True)
class Blow:
    """Something that is done to one process."""

    deed: str
    member: Member

    def __str__(self) -> str:
        how = {
            KILL: "killed (SIGKILL)",
            STOP: f"stopped for {STOP_SECONDS:g} s",
            SLOW: f"slowed down for {SLOW_SECONDS:g} s",
            CUT: f"cut off for {CUT_SECONDS:g} s, with all of its node",
        }
        where = f" of node {self.member.node[:8]}" if self.member.node else ""
        return f"{self.member.role} {self.member.pid}{where} {how[self.deed]}"

    def fall(self) -> None:
        """Do it to a process of this node; return when it is over. One that ends meanwhile is left alone."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.member.pid)
            if self.deed == KILL:
                process.kill()
            elif self.deed == STOP:
                _pause(process, STOP_SECONDS)
            else:
                end = time.monotonic() + SLOW_SECONDS
                while time.monotonic() < end:
                    _pause(process, PULSE_SECONDS)
                    time.sleep(PULSE_SECONDS)


def _pause(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    try:
        time.sleep(seconds)
    finally:
        process.resume()


class Storm:
    """Chooses blows: first a deed, then a role that can bear it, then one of its processes.

    Args:
        settings: the run's, of which those of its recovery say how often its learner may be killed.
        roles: those that are struck.
        killed: roles of ``ENDING`` that are killed too, for what starts again without them.
        rng: draws.
    """

    def __init__(
        self, settings: dict[str, Any], roles: Collection[str], killed: Collection[str], rng: random.Random
    ) -> None:
        self._most, self._minutes = (settings["run"][name] for name in ("max_recoveries", "recovery_minutes"))
        self._budget = RestartBudget(self._most, self._minutes)
        self._roles, self._killed, self._rng = set(roles), set(killed), rng
        self._last_cuts: dict[str, float] = {}

    def describe(self) -> str:
        """What it does to which roles, and which it leaves alone, as lines."""
        roles = [role for role in ROLES if role in self._roles]
        spared = [role for role in roles if role in ENDING and role not in self._killed]
        lines = {
            "Killed, stopped and slowed down": [role for role in roles if role not in spared],
            "Stopped and slowed down only, for a run starts anew or ends without them (--kill)": spared,
            "Left alone, for --roles does not name them": [role for role in ROLES if role not in roles],
        }
        told = [f"{how}: {', '.join(those)}." for how, those in lines.items() if those]
        if self._roles & set(LEARNING):
            told.append(
                f"A learner is killed {self._most} times in {self._minutes:g} min at most "
                "(run.max_recoveries, run.recovery_minutes): once more, and the run would end. "
                "Before the first checkpoint it is not: the run would begin anew (run.checkpoint_every)."
            )
        return "\n".join(told)

    def next_blow(self, present: Sequence[Member], now: float, has_checkpoint: bool) -> Blow | None:
        """A blow to one of ``present`` at the time ``now`` in seconds; ``None`` if nothing can bear one.

        Args:
            has_checkpoint: whether the run can go on without its learner, rather than begin anew.
        """
        deeds = [*DEEDS, CUT]
        self._rng.shuffle(deeds)
        for deed in deeds:
            able = [member for member in present if self._bears(member, deed, now)]
            roles = sorted({member.role for member in able})
            self._rng.shuffle(roles)
            for role in roles:
                if deed == KILL and role in LEARNING and not (has_checkpoint and self._budget.allow(now)):
                    continue
                member = self._rng.choice([member for member in able if member.role == role])
                if deed == CUT:
                    self._last_cuts[member.node] = now
                return Blow(deed, member)
        return None

    def _bears(self, member: Member, deed: str, now: float) -> bool:
        if member.stopped or member.role not in self._roles:
            return False
        if deed == CUT:
            was_cut = self._last_cuts.get(member.node, -math.inf) > now - CUT_PAUSE_SECONDS
            return member.role == "raylet" and member.node != "" and not was_cut
        return deed != KILL or member.role not in ENDING or member.role in self._killed


class Family:
    """The process below which a run lives, and all that have descended from it: none is forgotten.

    Raises:
        ConfigError: there is no such process.
    """

    def __init__(self, below: int) -> None:
        members(below)  # it names the remedy
        self.below = below
        self._root = psutil.Process(below)
        self._seen = {self._root}

    def is_alive(self) -> bool:
        """Whether the first of them lives. Its descendants are noted."""
        with suppress(psutil.NoSuchProcess):
            self._seen.update(self._root.children(recursive=True))
        return is_alive(self._root)

    def present(self) -> list[Member]:
        """Those with a role that live; none if the first of them has just ended."""
        with suppress(ConfigError):
            return members(self.below)
        return []

    def folder(self) -> Path:
        """The run's folder: the one whose lock one of these processes holds.

        Raises:
            ConfigError: none of them holds one.
        """
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                for file in process.open_files():
                    if Path(file.path).name == LOCK:
                        return Path(file.path).parent
        raise ConfigError(
            f"No process below {self.below} holds the folder of a run: name that folder with --run, or wait "
            "until the run has said where it is."
        )

    def left_over(self, seconds: float = END_SECONDS) -> Finding:
        """Whether all of them have ended, for which they get so many ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := [each for each in self._seen if is_alive(each)]) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if not left:
            return Finding(True, f"of {len(self._seen)} processes none is left")
        return Finding(False, "left: " + ", ".join(f"{each.pid} ({each.name()})" for each in left))


@dataclass
class Record:
    """What happened in a storm: blows by deed and role, and the updates that the run has made in it."""

    num_updates_before: int
    num_updates: int
    blows: Counter[str] = field(default_factory=Counter)
    longest_pause: float = 0.0
    """Most seconds between two blows at which the number of updates differed."""


def num_updates(folder: Path) -> int:
    """How many updates the run in ``folder`` has made."""
    return max((record["step"] for record in read_consumed_log(folder)), default=0)


def wait_for_updates(family: Family, folder: Path) -> None:
    """Return when the run has made an update: before it there is no rollout to lose.

    Raises:
        ConfigError: the run has ended before.
    """
    while num_updates(folder) == 0:
        if not family.is_alive():
            raise ConfigError(
                f"Process {family.below} has ended before its first update: its output says why."
            )
        time.sleep(LOOK_SECONDS)


class Nodes(Protocol):
    """Where a storm finds processes, and strikes them."""

    def present(self) -> list[Member]: ...

    def strike(self, blow: Blow) -> None: ...


class ThisNode:
    """The family of a run, on the node of this process."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def present(self) -> list[Member]:
        """Those with a role that live."""
        return self._family.present()

    def strike(self, blow: Blow) -> None:
        """Do it."""
        blow.fall()


class AllNodes:
    """The family of a run on this node, and what runs on the other nodes of its cluster."""

    def __init__(self, here: Nodes, elsewhere: Nodes) -> None:
        self._here, self._elsewhere = here, elsewhere

    def present(self) -> list[Member]:
        """Those with a role that live."""
        return self._here.present() + self._elsewhere.present()

    def strike(self, blow: Blow) -> None:
        """Have it done where it is meant for."""
        (self._elsewhere if blow.member.node else self._here).strike(blow)


def rage(
    storm: Storm,
    nodes: Nodes,
    family: Family,
    folder: Path,
    every: float,
    seconds: float,
    say: Callable[[str], None],
) -> Record:
    """Strike every so many seconds, for ``seconds`` or until the run in ``folder`` has ended."""
    start = moved = time.monotonic()
    record, checkpoints = Record(num_updates(folder), num_updates(folder)), CheckpointFolder(folder, kept=1)
    with suppress(KeyboardInterrupt):  # the storm is over, and the run is looked at
        for number in range(int(seconds / every)):
            time.sleep(max(0.0, start + number * every - time.monotonic()))
            present = nodes.present()
            if not family.is_alive():
                say(f"Process {family.below} has ended.")
                break
            now = time.monotonic()
            if (made := num_updates(folder)) != record.num_updates:
                record.num_updates, moved = made, now
            record.longest_pause = max(record.longest_pause, now - moved)
            blow = storm.next_blow(present, now, checkpoints.latest() is not None)
            if blow is not None:
                say(f"[{now - start:6.1f} s] {blow}")
                record.blows[f"{blow.deed} {blow.member.role}"] += 1
                nodes.strike(blow)
    record.num_updates = num_updates(folder)
    return record


def goes_on(
    family: Family, made: Callable[[], int], num_planned: int, seconds: float = CALM_SECONDS
) -> Finding:
    """Whether a run makes another update after the storm, unless it has ended or made all ``num_planned``.

    Args:
        made: asks how many updates it has made.
    """
    start, fewest = time.monotonic(), made()
    while family.is_alive() and fewest < num_planned:
        waited, now = time.monotonic() - start, made()
        if now > fewest:
            return Finding(True, f"the run goes on: the next update came {waited:.0f} s after the storm")
        if waited >= seconds:
            return Finding(
                False, f"no update within {seconds:g} s after the storm: ask `{command_name('status')}` why"
            )
        fewest = now  # a run that went on from its checkpoint has fewer again
        time.sleep(LOOK_SECONDS)
    return Finding(True, "the run did not wait for anything after the storm: it has ended or is at its end")


def wait_for_end(family: Family) -> None:
    """Return when the run has ended, or with Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while family.is_alive():
            time.sleep(LOOK_SECONDS)
