"""A new version for a share of a served policy's clients, until feedback and held-out tasks decide.

    launch.serve model.path=runs/a server.versions=[31] server.recording.folder=recordings
    python -m launch.recipes.canary start recordings policy@31 --share 0.1
    python -m launch.recipes.canary judge recordings --held-out served.jsonl canary.jsonl

``start`` lets policy@31 answer a tenth of the conversations with the policy, and sample a tenth of those with
its agents. ``judge`` compares the feedback on both since then, and the results of ``launch.evaluate`` for
both on the same held-out tasks; it promotes the canary, which then answers all, or rolls it back, or lets the
trial go on. The servers follow within a request. ``end`` decides by hand.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from environments.command_name import command_parser, explained
from environments.data.canary import (
    CONVERSATION,
    FILE,
    KEY,
    PROMOTED,
    ROLLED_BACK,
    TRIAL,
    Canary,
    Difference,
    decide,
    difference,
    paired_difference,
    read_canary,
)
from environments.data.recordings import ABOUT, Recording, read_recordings
from environments.data.trajectory_file import read_trajectories
from environments.errors import ConfigError
from environments.pass_at_k import successes_by_task
from launch.recipes.feedback import READER
from policies.agent_api.frontend import PREFIX

DECIDED, OPEN = 0, 3
"""Exit statuses of ``judge``: the trial has ended, or goes on."""


def started_canary(folder: Path, version: str, share: float, by: str = CONVERSATION) -> Canary:
    """Start a trial, which the servers that record into ``folder`` follow.

    Raises:
        ConfigError: a trial is open there or has promoted a version, the share is none, or the name is not
            that of a version.
    """
    if not 0 < share < 1:
        raise ConfigError(f"--share={share:g} is no share: choose one between 0 and 1, such as 0.1.")
    name, _, number = version.partition("@")
    if not name or not number:
        raise ConfigError(f"{version!r} names no version: write policy@31, of server.versions=[31].")
    if not (folder / ABOUT).is_file():
        raise ConfigError(f"{folder} is no folder of recordings: name a server's server.recording.folder.")
    earlier = read_canary(folder)
    if earlier is not None and earlier.state == TRIAL:
        raise ConfigError(f"{earlier.version} is on trial in {folder}: judge it, or end it first.")
    if earlier is not None and earlier.state == PROMOTED:
        raise ConfigError(
            f"{earlier.version} was promoted in {folder}, and would answer no more: serve it as the model, "
            f"and delete {folder / FILE}."
        )
    canary = Canary(version=version, share=share, started=int(time.time()), by=by)
    canary.write(folder)
    return canary


def judged_canary(
    folder: Path, held_out: tuple[Path, Path] | None, margin: float, reader: str = READER
) -> tuple[Canary, Difference, Difference | None]:
    """Judge the trial of a folder by ``decide``, and write what came of it.

    Args:
        held_out: results of ``launch.evaluate`` for the version in service, and for the canary.

    Returns:
        The canary with its state, and the differences of feedback and of held-out success.

    Raises:
        ConfigError: ``margin`` is none, there is no open trial, ``reader`` may not read the recordings, the
            version in service has changed since the trial began, another trial has begun meanwhile, or the
            results are not of the same tasks, or in the other order.
        DatasetError: a file is none of results.
    """
    if not 0 <= margin < math.inf:
        raise ConfigError(f"--margin={margin:g} is no loss: choose one from 0, such as 0.1.")
    canary = _on_trial(folder)
    recordings = [each for each in read_recordings(folder, reader) if each.answer.created >= canary.started]
    feedback = difference(*(_scores(recordings, canary, is_its) for is_its in (True, False)))
    success = None if held_out is None else _held_out_difference(canary, *held_out)
    state, reason = decide(feedback, success, margin)
    if _on_trial(folder) != canary:  # somebody has ended it while this has read, and has started another
        raise ConfigError(f"Another trial has begun in {folder} meanwhile: judge that one.")
    canary = replace(canary, state=state, reason=reason)
    if state != TRIAL:
        canary.write(folder)
    return canary, feedback, success


def _on_trial(folder: Path) -> Canary:
    canary = read_canary(folder)
    if canary is None or canary.state != TRIAL:
        ended, remedy = "" if canary is None else f" ({canary.version} was {canary.state})", "start one"
        if canary is not None and canary.state == PROMOTED:
            remedy = f"delete {folder / FILE} to have the model answer again"
        raise ConfigError(f"No canary is on trial in {folder}{ended}: {remedy}.")
    return canary


def _scores(recordings: Iterable[Recording], canary: Canary, is_its: bool) -> list[float]:
    """The mean score of each unit with feedback: units are independent of each other, answers are not.

    A client that has asked for a version by its name, or number, is left out: chance compares the two.

    Args:
        is_its: true for those of the canary, false for those of the version in service.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    versions: set[int] = set()
    for each in recordings:
        if _has_answered(canary, each.answer.model, is_its):
            unit = canary.unit(each.answer.owner, each.answer.conversation)
            if canary.answers(unit) == is_its:
                versions |= {completion.policy_version for completion in each.trajectory.completions}
                scores[unit].append(each.feedback.score)
    if len(versions) > 1:
        name = canary.version if is_its else canary.served
        raise ConfigError(
            f"{name} has answered as the versions {sorted(versions)} since the trial began: end it, and "
            "start it anew."
        )
    return [fmean(each) for each in scores.values()]


def _has_answered(canary: Canary, model: str, is_its: bool) -> bool:
    """Return whether the canary, or else the version in service, has answered by the recorded name ``model``,
    for the policy or for an agent.
    """
    name, _, version = model.partition("@")
    is_of_policy = name == canary.served or name.startswith(PREFIX)
    return is_of_policy and version == (canary.version.partition("@")[2] if is_its else "")


def _held_out_difference(canary: Canary, served: Path, on_trial: Path) -> Difference:
    """The difference of success on the tasks that both files of results have."""
    (before, own), (after, others) = (_results(each) for each in (served, on_trial))
    if own == {canary.version.partition("@")[2]} != others:
        raise ConfigError(
            f"{served} has the results of {canary.version}, and --held-out takes those of the version in "
            "service first: change their order."
        )
    if before.keys() != after.keys():
        raise ConfigError(
            f"{served} and {on_trial} have {len(before.keys() & after.keys())} tasks in common, of "
            f"{len(before)} and {len(after)}: evaluate both versions on the same held-out tasks."
        )
    return paired_difference(*([fmean(results[task]) for task in before] for results in (after, before)))


def _results(path: Path) -> tuple[dict[str, list[bool]], set[str]]:
    """Successes by the task, without what infrastructure has spoilt, which another evaluation plays again;
    and the numbers of the versions that have sampled them.
    """
    reasons = ((each, each.termination_reason) for each in read_trajectories(path))
    played = [each for each, reason in reasons if reason is None or not reason.is_infrastructure]
    versions = {str(turn.policy_version) for each in played for turn in each.completions}
    return successes_by_task(played), versions


@explained(OSError)
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0, 2 for a printed reason, or 3 where a trial goes on."""
    options = command_parser("launch.recipes.canary", __doc__)
    commands = options.add_subparsers(dest="command", required=True)
    start, judge, end = (commands.add_parser(name) for name in ("start", "judge", "end"))
    for each in (start, judge, end):
        each.add_argument("recordings", type=Path, help="server.recording.folder of the server")
    start.add_argument("version", help="its name for clients, such as policy@31")
    start.add_argument("--share", type=float, default=0.1, help="part of the conversations that it answers")
    start.add_argument("--by", choices=[CONVERSATION, KEY], default=CONVERSATION, help="unit of the share")
    judge.add_argument(
        "--held-out", type=Path, nargs=2, metavar="JSONL", help="results of the served version, of the canary"
    )
    judge.add_argument("--margin", type=float, default=0.1, help="loss that a promotion allows")
    judge.add_argument("--reader", default=READER, help="a name in server.recording.readers")
    end.add_argument("state", choices=["promote", "roll-back"])
    given = options.parse_args(arguments)
    if given.command == "start":
        canary = started_canary(given.recordings, given.version, given.share, given.by)
        sys.stdout.write(f"{canary.version} answers {canary.share:g} of all {canary.by}s.\n")
    elif given.command == "judge":
        canary, feedback, success = judged_canary(
            given.recordings, given.held_out, given.margin, given.reader
        )
        sys.stdout.write(_report(canary, feedback, success))
        return OPEN if canary.state == TRIAL else DECIDED
    else:
        state = PROMOTED if given.state == "promote" else ROLLED_BACK
        replace(_on_trial(given.recordings), state=state, reason="By hand.").write(given.recordings)
        sys.stdout.write(f"The canary is {state}.\n")
    return DECIDED


def _report(canary: Canary, feedback: Difference, success: Difference | None) -> str:
    rows = {"feedback": feedback, "held-out success": success}
    table = "".join(
        f"| {name} | {each} | {each.num_canary} | {each.num_served} |\n"
        for name, each in rows.items()
        if each
    )
    return (
        "| canary less version in service, 99 % interval | | canary | in service |\n|---|---|---|---|\n"
        f"{table}\n{canary.version}: {canary.state}. {canary.reason}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
