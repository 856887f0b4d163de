"""``python -m launch.chaos``: kill and stop processes of a running job, to see what it does.

    python -m launch.chaos                          list the processes on this node, by role
    python -m launch.chaos kill replica --below 42  SIGKILL to one of them, drawn at random
    python -m launch.chaos stop actor --below 42    SIGSTOP to one of them
    python -m launch.chaos go-on actor --below 42   SIGCONT to one of them
    python -m launch.chaos storm --below 42 --every 5 --minutes 10
                                                    kill, stop and slow down what chance chooses, then check
                                                    the run's folder

kill, stop, go-on and storm need ``--below PID``, so that they cannot hit another person's run. PID is the
driver of a run that has started its own Ray, or the raylet of a cluster's node. Only processes of this node
are seen, unless a storm gets the address of a cluster: then the processes of all runs on the other nodes
get faults too, and nodes are cut off, by stopping all of their processes.

A storm waits until the run has made an update. Then it kills processes without which a run goes on, a
learner as often as run.max_recoveries allows, and stops and slows down processes of every role. Roles of
--kill are killed too. A run ends when its driver or one of Ray's own processes is killed. To test that, start
the run in a loop, and give the PID of the loop:
sh -c 'until python -m launch.train ... run.resume=true; do :; done'.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from functools import partial
from pathlib import Path

from environments.command_name import command_parser, explained, positive
from launch.fault_injection.fault import send_signal
from launch.fault_injection.other_nodes import OtherNodes
from launch.fault_injection.process_tree import ProcessTree
from launch.fault_injection.storm import (
    ENDING,
    Storm,
    StormRecord,
    makes_progress,
    num_updates,
    run_storm,
    wait_for_updates,
)
from launch.health.members import ROLES, members
from launch.reporting.audit import SCORE, RunRecords, audit, num_planned, read_run

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "go-on": signal.SIGCONT}
COUNTED = (
    "stream/retries",
    "stream/resumed_turns",
    "stream/wasted_tokens_replayed",
    "stream/wasted_tokens_unwanted",
)
"""Metrics whose sums are the costs of a storm."""

_print = partial(print, flush=True)


def storm(options: argparse.Namespace) -> int:
    """Run a storm and check the run; return 0 if it is sound, else 1."""
    tree = ProcessTree(options.below)
    folder = options.run or tree.folder()
    settings = read_run(folder).settings
    seed = random.randrange(2**31) if options.seed is None else options.seed
    faults = Storm(settings, options.roles, options.kill, random.Random(seed))
    _print(
        f"A storm over process {options.below}, {folder}: {options.minutes:g} min, a fault every "
        f"{options.every:g} s, --seed {seed}.\n{faults.describe()}\n"
        + ("Other nodes get faults and are cut off too." if options.address else "Other nodes get no faults.")
    )
    others = OtherNodes(options.address) if options.address else None
    wait_for_updates(tree, folder)
    record = run_storm(faults, tree, others, folder, options.every, 60 * options.minutes, _print)
    findings = [makes_progress(tree, partial(num_updates, folder), num_planned(settings))]
    if options.wait:
        tree.wait_for_end()
    run = read_run(folder)
    _print_costs(record, run)
    has_ended = not tree.is_alive()
    findings += audit(run, has_ended, options.score)
    if has_ended:
        findings.append(tree.left_over())
    for finding in findings:
        _print(str(finding))
    return 0 if all(finding.is_sound for finding in findings) else 1


def _print_costs(record: StormRecord, run: RunRecords) -> None:
    faults = ", ".join(f"{count} x {fault}" for fault, count in sorted(record.faults.items()))
    _print(f"{record.faults.total()} faults: {faults or 'none'}")
    _print(
        f"{record.num_updates - record.num_updates_before} updates in the storm, "
        f"{record.longest_pause:.0f} s without one at most"
    )
    for name in COUNTED:
        _print(f"{name}: {sum(each.get(name, 0) for each in run.metrics):g}")
    scores = [f"{each[SCORE]:.3f} after {each['step']}" for each in run.metrics if SCORE in each]
    _print(f"held-out reward: {', '.join(scores) or 'no evaluation yet'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    below = argparse.ArgumentParser(add_help=False)
    below.add_argument(
        "--below", type=int, required=True, metavar="PID", help="only this process and its descendants"
    )
    below.add_argument("--seed", type=int, help="of the choice among many")
    whole = command_parser("chaos", __doc__)
    commands = whole.add_subparsers(dest="command")
    shown = commands.add_parser("list", help="what runs on this node, by role")
    shown.add_argument("--below", type=int, metavar="PID", help="only this process and its descendants")
    for name, number in SIGNALS.items():
        signalled = commands.add_parser(name, parents=[below], help=f"{number.name} to one process")
        signalled.add_argument("role", choices=tuple(ROLES))
    stormy = commands.add_parser("storm", parents=[below], help="many faults, then checks of the run")
    stormy.add_argument("--run", type=Path, metavar="FOLDER", help="run.directory, by default that run's")
    stormy.add_argument("--address", metavar="HOST:PORT", help="of its cluster, for faults on all nodes")
    stormy.add_argument("--every", type=positive, default=5.0, metavar="SECONDS", help="between two faults")
    stormy.add_argument("--minutes", type=positive, default=10.0)
    stormy.add_argument("--roles", nargs="+", default=list(ROLES), choices=ROLES, help="these get faults")
    stormy.add_argument("--kill", nargs="+", default=[], choices=ENDING, help="roles that are killed too")
    stormy.add_argument("--score", type=float, help="least held-out reward of the newest evaluation")
    stormy.add_argument("--wait", action="store_true", help="check when the run has ended, its processes too")
    whole.set_defaults(command="list", below=None)
    return whole


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 1 a storm has broken the run, 2 not done, for a reason
    that was printed.
    """
    options = parser().parse_args(arguments)
    present = members(options.below)
    if options.command == "storm":
        return storm(options)
    if options.command == "list":
        for member in present:
            state = "  (stopped)" if member.stopped else ""
            sys.stdout.write(f"{member.role:<10}  {member.pid}{state}\n")
    else:
        signal_number = SIGNALS[options.command]
        member = send_signal(options.role, signal_number, options.below, random.Random(options.seed))
        sys.stdout.write(f"{signal_number.name} to the {member.role} {member.pid}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
