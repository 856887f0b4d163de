"""The processes of a run by their roles: ``launch.status`` names them, ``launch.chaos`` injects faults."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import psutil

from environments.command_name import command_name
from environments.errors import ConfigError

ROLES = {
    "driver": r"\S*python\S* (-\S+ )*(-m launch\.|\S*/troupe )train( |$)",
    "learner": r"ray::LearnerWorker\b",
    "critic": r"ray::CriticWorker\b",
    "replica": r"ray::ServeReplica:.*:PolicyServer\b",
    "queue": r"ray::TrajectoryQueue\b",
    "fleet": r"ray::(RolloutFleet|FleetPart)\b",
    "actor": r"ray::RolloutActor\b",
    "sampler": r"ray::SamplerActor\b",
    "store": r"ray::WeightStore\b",
    "directory": r"ray::SamplerDirectory\b",
    "controller": r"ray::ServeController\b",
    "proxy": r"ray::ProxyActor\b",
    "raylet": r"\S*/raylet ",
    "gcs": r"\S*/gcs_server ",
}
"""Beginning of the command line of a process of each role. Ray writes the names of its actors there."""


@dataclass(frozen=True, order=True)
class Member:
    """A process of a run: its role, its id, whether it was stopped, and Ray's id of its node.

    A node is named where it is another one than this.
    """

    role: str
    pid: int
    stopped: bool = False
    node: str = ""


def role_of(command_line: str) -> str | None:
    """The role of a process by its command line, or None if it is none of Troupe's."""
    return next((role for role, pattern in ROLES.items() if re.match(pattern, command_line)), None)


def members(below: int | None = None) -> list[Member]:
    """The living processes of this node that have a role, sorted.

    Args:
        below: only this process and those that descend from it.

    Raises:
        ConfigError: there is no process ``below``.
    """
    found = []
    for process in _processes(below):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is somebody else's
            role, status = role_of(" ".join(process.cmdline())), process.status()
            if role is not None and status != psutil.STATUS_ZOMBIE:
                found.append(Member(role, process.pid, status == psutil.STATUS_STOPPED))
    return sorted(found)


def _processes(below: int | None) -> list[psutil.Process]:
    if below is None:
        return list(psutil.process_iter())
    try:
        root = psutil.Process(below)
        return [root, *root.children(recursive=True)]
    # The last two: no process has such an id.
    except (psutil.NoSuchProcess, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--below {below}: there is no such process. `{command_name('chaos')}` lists what runs."
        ) from error


def is_alive(process: psutil.Process) -> bool:
    """Return whether ``process`` runs: one that has ended stays there until its parent has taken note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
