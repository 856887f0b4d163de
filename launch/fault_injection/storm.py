"""A storm over a running job: faults at random, and whether the run goes on through them.

``launch.chaos storm`` runs one, to see whether a run keeps its promises; ``launch.verify`` checks its folder.

        Storm ──next_fault──▶ Fault ──inject──▶ a process of the run's ProcessTree, on this node
          │                     └─────────────▶ a FaultInjector, on the node that it is for (OtherNodes)
          └ every so many seconds, drawn from the processes that are present; run_storm counts the updates
            that the run makes meanwhile, makes_progress waits for the first one after it
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
from typing import Any

from actors.timing import CUT_PAUSE_SECONDS, STORM_CALM_SECONDS
from environments.command_name import command_name
from environments.errors import ConfigError
from launch.fault_injection.fault import CUT, FAULT_KINDS, KILL, Fault
from launch.fault_injection.other_nodes import OtherNodes
from launch.fault_injection.process_tree import RUN_POLL_SECONDS, ProcessTree
from launch.health.members import ROLES, Member
from launch.health.restart_budget import RECOVERY_MINUTES, RestartBudget
from launch.reporting.audit import Finding
from launch.run_folder.checkpoint import CheckpointFolder
from launch.run_folder.consumed_log import read_consumed_log

ENDING = ("driver", "fleet", "queue", "store", "directory", "raylet", "gcs")
"""Roles without which a run starts all of its processes anew, or ends: they are killed only on demand."""
LEARNING = ("learner", "critic")
"""Roles that a run goes on without as often as its settings of recovery allow."""


class Storm:
    """Chooses faults: first a kind, then a role that can bear it, then one of its processes.

    Args:
        settings: the run's, of which those of its recovery limit how often its learner is killed.
        roles: those that get faults.
        killed: roles of ``ENDING`` that are killed too, for what starts again without them.
        rng: draws.
    """

    def __init__(
        self, settings: dict[str, Any], roles: Collection[str], killed: Collection[str], rng: random.Random
    ) -> None:
        self._most = settings["run"]["max_recoveries"]
        self._budget = RestartBudget(self._most)
        self._roles, self._killed, self._rng = set(roles), set(killed), rng
        self._last_cuts: dict[str, float] = {}

    def describe(self) -> str:
        """Lines on the faults of each role, and the roles that are left alone."""
        roles = [role for role in ROLES if role in self._roles]
        spared = [role for role in roles if role in ENDING and role not in self._killed]
        groups = {
            "Killed, stopped and slowed down": [role for role in roles if role not in spared],
            "Stopped and slowed down only, for a run starts anew or ends without them (--kill)": spared,
            "Left alone, for --roles does not name them": [role for role in ROLES if role not in roles],
        }
        lines = [f"{how}: {', '.join(those)}." for how, those in groups.items() if those]
        if self._roles & set(LEARNING):
            lines.append(
                f"A learner is killed {self._most} times in {RECOVERY_MINUTES:g} min at most "
                "(run.max_recoveries): once more, and the run would end. "
                "Before the first checkpoint it is not: the run would begin anew (run.checkpoints.every)."
            )
        return "\n".join(lines)

    def next_fault(self, present: Sequence[Member], now: float, has_checkpoint: bool) -> Fault | None:
        """A fault for one of ``present`` at the time ``now`` in seconds; ``None`` if none can bear one.

        Args:
            has_checkpoint: whether the run can go on without its learner, rather than begin anew.
        """
        kinds = [*FAULT_KINDS, CUT]
        self._rng.shuffle(kinds)
        for kind in kinds:
            able = [member for member in present if self._bears(member, kind, now)]
            roles = sorted({member.role for member in able})
            self._rng.shuffle(roles)
            for role in roles:
                if kind == KILL and role in LEARNING and not (has_checkpoint and self._budget.allow(now)):
                    continue
                member = self._rng.choice([member for member in able if member.role == role])
                if kind == CUT:
                    self._last_cuts[member.node] = now
                return Fault(kind, member)
        return None

    def _bears(self, member: Member, kind: str, now: float) -> bool:
        if member.stopped or member.role not in self._roles:
            return False
        if kind == CUT:
            was_cut = self._last_cuts.get(member.node, -math.inf) > now - CUT_PAUSE_SECONDS
            return member.role == "raylet" and member.node != "" and not was_cut
        return kind != KILL or member.role not in ENDING or member.role in self._killed


@dataclass
class StormRecord:
    """Faults of a storm by kind and role, and the updates that the run has made in it."""

    num_updates_before: int
    num_updates: int
    faults: Counter[str] = field(default_factory=Counter)
    longest_pause: float = 0.0
    """Longest time between two faults at which the number of updates differed."""


def num_updates(folder: Path) -> int:
    """Number of updates that the run in ``folder`` has made."""
    return max((record["step"] for record in read_consumed_log(folder)), default=0)


def wait_for_updates(tree: ProcessTree, folder: Path) -> None:
    """Return when the run has made an update: before it there is no rollout to lose.

    Raises:
        ConfigError: the run has ended before.
    """
    while num_updates(folder) == 0:
        if not tree.is_alive():
            raise ConfigError(f"Process {tree.below} has ended before its first update: its output says why.")
        time.sleep(RUN_POLL_SECONDS)


def run_storm(
    storm: Storm,
    tree: ProcessTree,
    others: OtherNodes | None,
    folder: Path,
    every: float,
    seconds: float,
    announce: Callable[[str], None],
) -> StormRecord:
    """Inject a fault every so many seconds, for ``seconds`` or until the run in ``folder`` has ended.

    Args:
        others: nodes that get faults too.
        announce: prints a line for each fault.
    """
    start = moved = time.monotonic()
    record, checkpoints = StormRecord(num_updates(folder), num_updates(folder)), CheckpointFolder(folder, 1)
    with suppress(KeyboardInterrupt):  # the storm is over, and the run is checked
        for number in range(int(seconds / every)):
            time.sleep(max(0.0, start + number * every - time.monotonic()))
            present = tree.present() + (others.present() if others else [])
            if not tree.is_alive():
                announce(f"Process {tree.below} has ended.")
                break
            now = time.monotonic()
            if (made := num_updates(folder)) != record.num_updates:
                record.num_updates, moved = made, now
            record.longest_pause = max(record.longest_pause, now - moved)
            fault = storm.next_fault(present, now, checkpoints.latest() is not None)
            if fault is not None:
                announce(f"[{now - start:6.1f} s] {fault}")
                record.faults[f"{fault.kind} {fault.member.role}"] += 1
                if others and fault.member.node:
                    others.inject(fault)
                else:
                    fault.inject()
    record.num_updates = num_updates(folder)
    return record


def makes_progress(
    tree: ProcessTree, made: Callable[[], int], num_planned: int, seconds: float = STORM_CALM_SECONDS
) -> Finding:
    """Check that a run makes another update after the storm, unless it has ended or made all ``num_planned``.

    Args:
        made: returns the number of updates that it has made.
    """
    start, fewest = time.monotonic(), made()
    while tree.is_alive() and fewest < num_planned:
        waited, now = time.monotonic() - start, made()
        if now > fewest:
            return Finding(True, f"the run goes on: the next update came {waited:.0f} s after the storm")
        if waited >= seconds:
            return Finding(
                False, f"no update within {seconds:g} s after the storm: ask `{command_name('status')}` why"
            )
        fewest = now  # a run that went on from its checkpoint has fewer again
        time.sleep(RUN_POLL_SECONDS)
    return Finding(True, "the run did not wait for anything after the storm: it has ended or is at its end")
