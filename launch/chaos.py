"""``python -m launch.chaos kill learner --below PID``: end one process of a running job, to see what it does.

    python -m launch.chaos                          what runs on this node, by role
    python -m launch.chaos kill replica --below 42  SIGKILL to one of them, drawn at random
    python -m launch.chaos stop actor --below 42    SIGSTOP to one of them
    python -m launch.chaos go-on actor --below 42   SIGCONT to one of them

Only processes of this node are seen. A signal always needs ``--below``, so that it never meets the run of
somebody else: the driver of a run that has started its own Ray, or the raylet of a cluster's node.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from environments.errors import ConfigError, TroupeError

ROLES = {
    "driver": r"\S*python\S* (-\S+ )*(-m launch\.|\S*/troupe )train( |$)",
    "learner": r"ray::LearnerWorker\b",
    "critic": r"ray::CriticWorker\b",
    "replica": r"ray::ServeReplica:.*:PolicyServer\b",
    "queue": r"ray::_QueueActor\b",
    "fleet": r"ray::RolloutFleet\b",
    "actor": r"ray::RolloutActor\b",
    "sampler": r"ray::SamplerActor\b",
    "store": r"ray::WeightStore\b",
    "directory": r"ray::SamplerDirectory\b",
    "controller": r"ray::ServeController\b",
    "proxy": r"ray::ProxyActor\b",
    "raylet": r"\S*/raylet ",
    "gcs": r"\S*/gcs_server ",
}
"""What the command line of a process of each role starts with. Ray writes its actors' there."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "go-on": signal.SIGCONT}


@dataclass(frozen=True, order=True)
class Member:
    """A process of a run: its role, its id, and whether it was stopped."""

    role: str
    pid: int
    stopped: bool = False


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
    return sorted(_members(below))


def _members(below: int | None) -> Iterator[Member]:
    for process in _processes(below):
        try:
            role, status = role_of(" ".join(process.cmdline())), process.status()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended while we looked, or is somebody else's
        if role is not None and status != psutil.STATUS_ZOMBIE:
            yield Member(role, process.pid, status == psutil.STATUS_STOPPED)


def _processes(below: int | None) -> list[psutil.Process]:
    if below is None:
        return list(psutil.process_iter())
    try:
        root = psutil.Process(below)
        return [root, *root.children(recursive=True)]
    except (
        psutil.NoSuchProcess,
        ValueError,
        OverflowError,
    ) as error:  # the last two: no process has such an id
        raise ConfigError(
            f"--below {below}: there is no such process. `python -m launch.chaos` lists what runs."
        ) from error


def choose(present: Sequence[Member], role: str, rng: random.Random) -> Member:
    """One of the members of ``role``. Raises ``ConfigError`` if there is none."""
    candidates = [member for member in present if member.role == role]
    if not candidates:
        running = ", ".join(sorted({member.role for member in present})) or "nothing of Troupe's"
        raise ConfigError(f"There is no {role} below that process on this node; there is: {running}.")
    return rng.choice(candidates)


def strike(role: str, signal_number: signal.Signals, below: int, rng: random.Random) -> Member:
    """Send a signal to one process of ``role``, ``below`` or one of its descendants; return which it was.

    Raises:
        ConfigError: there is no such process.
    """
    member = choose(members(below), role, rng)
    try:
        psutil.Process(member.pid).send_signal(signal_number)
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"The {role} {member.pid} has just ended by itself: try again.") from error
    return member


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("deed", nargs="?", default="list", choices=("list", *SIGNALS))
    parser.add_argument("role", nargs="?", choices=tuple(ROLES))
    parser.add_argument("--below", type=int, metavar="PID", help="only this process and its descendants")
    parser.add_argument("--seed", type=int, help="of the choice among many")
    options = parser.parse_args(arguments)
    strikes = options.deed != "list"
    if strikes and (options.role is None or options.below is None):
        parser.error(f"{options.deed} needs a role and --below PID, the process whose run is meant")
    if not strikes and options.role is not None:
        parser.error("list takes no role: it names all")
    try:
        if strikes:
            rng = random.Random(options.seed)
            member = strike(options.role, SIGNALS[options.deed], options.below, rng)
            sys.stdout.write(f"{SIGNALS[options.deed].name} to the {member.role} {member.pid}.\n")
        else:
            for member in members(options.below):
                state = "  (stopped)" if member.stopped else ""
                sys.stdout.write(f"{member.role:<10}  {member.pid}{state}\n")
    except TroupeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
