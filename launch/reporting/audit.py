"""Checks of a run by its folder: ``launch.verify`` and ``launch.chaos storm`` say whether it is sound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.errors import ConfigError
from launch.reporting.metrics import FRESH_MISMATCH
from launch.reporting.tracker import METRICS, SETTINGS, read_metrics, read_settings
from launch.run_folder.consumed_log import CONSUMED_LOG, Consumed, read_consumed_log
from launch.run_folder.trajectory_log import TRAIN, TRAINED, kept_steps, read_kept
from launch.settings.tree import TASKS

SCORE = "eval/reward_mean"
SECTIONS = {"reinforce": "run", "expert_iteration": "expert_iteration"}
"""The stages that roll out, and the settings that hold their updates."""
OFFLINE = {"warm_start", "preferences"}
"""The stages that play nothing."""
MOST_NAMED = 5
"""Rollouts that a finding names; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """Result of a check: whether the run is as it has to be, and what was seen."""

    is_sound: bool
    text: str

    def __str__(self) -> str:
        return f"{'sound  ' if self.is_sound else 'BROKEN '} {self.text}"


@dataclass(frozen=True)
class RunRecords:
    """Records that a run has written so far.

    ``settings`` are the run's, ``metrics`` a record of each update and evaluation, ``versions`` those of the
    tokens of each rollout that was trained on and is kept, turn by turn.
    """

    settings: dict[str, Any]
    consumed: list[Consumed]
    metrics: list[dict[str, float]] = field(default_factory=list)
    versions: dict[str, list[int]] = field(default_factory=dict)


def read_run(directory: Path) -> RunRecords:
    """The records of the run in ``directory``. Raises ``TroupeError`` if there are none yet."""
    _, settings = read_settings(directory)
    versions = {
        kept.trajectory.rollout_id: [
            version
            for step in kept.trajectory.steps
            if step.completion is not None
            for version in step.completion.token_versions
        ]
        for step in kept_steps(directory, TRAIN)
        for kept in read_kept(directory, TRAIN, step)
        if kept.outcome == TRAINED
    }
    return RunRecords(settings, read_consumed_log(directory), read_metrics(directory), versions)


def audit(run: RunRecords, has_ended: bool = False, score: float | None = None) -> list[Finding]:
    """Findings of all checks of a run, which may still be going on.

    Args:
        has_ended: makes ``is_complete`` one of them.
        score: makes ``score_reached`` one.

    Raises:
        ConfigError: the records are not those of a run.
    """
    checks = (*CHECKS, is_complete) if has_ended else CHECKS
    try:
        findings = [check(run) for check in checks]
        return findings if score is None else [*findings, score_reached(run, score)]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The run's records are not those of a training ({error!r}): copy its {SETTINGS}, {METRICS} and "
            f"{CONSUMED_LOG} again."
        ) from error


def each_rollout_once(run: RunRecords) -> Finding:
    """Check that no update consumes a rollout that one has consumed already."""
    counts = Counter(_consumed(run))
    twice = [rollout_id for rollout_id, count in counts.items() if count > 1]
    return _finding(
        twice, f"{len(counts)} rollouts were used in {len(run.consumed)} updates, each once", "used twice"
    )


def no_rollout_lost(run: RunRecords) -> Finding:
    """Check that groups are consumed whole, and none is left out but those that may be under way."""
    ids = set(_consumed(run))
    consumed = {int(rollout_id.partition("/")[0]) for rollout_id in ids}
    num_groups = max(consumed, default=-1) + 1
    num_left_out = num_groups - len(consumed)
    wanted = sorted(consumed) if num_left_out <= most_overtaken(run) else range(num_groups)
    num_members = int(run.settings["rollout"]["group_size"])
    members = (f"{group:08d}/{member:04d}" for group in wanted for member in range(num_members))
    lost = [rollout_id for rollout_id in members if rollout_id not in ids]
    under_way = f": {num_left_out} are still under way" if num_left_out else ""
    return _finding(lost, f"no rollout of the {num_groups} groups so far is missing{under_way}", "missing")


def most_overtaken(run: RunRecords) -> int:
    """Largest number of groups that others may have overtaken, and that are not consumed yet.

    None in the order of the tasks. In that of completion as many as are under way after an update, as long as
    there are updates to come: a run requests no group that it does not consume.
    """
    rollout = run.settings["rollout"]
    if rollout["group_order"] == TASKS or _has_ended(run):
        return 0
    return int(rollout["max_staleness"]) * int(rollout["groups_per_step"])


def staleness_within_bound(run: RunRecords) -> Finding:
    """Check that no update has learned from a token that was older than it may be."""
    bound, seen = int(run.settings["rollout"]["max_staleness"]), _by_step(run, "stream/staleness_max")
    too_old = [f"update {step} ({staleness:g})" for step, staleness in seen.items() if staleness > bound]
    most = max(seen.values(), default=0)
    return _finding(too_old, f"staleness was {most:g} at most, of {bound} allowed", "too old")


def versions_ascend(run: RunRecords) -> Finding:
    """Check that within an episode the policy only becomes newer: no engine fell back."""
    backwards = [rollout_id for rollout_id, versions in run.versions.items() if versions != sorted(versions)]
    return _finding(backwards, f"versions ascend within all {len(run.versions)} kept rollouts", "fell back")


def tokens_are_of_their_version(run: RunRecords) -> Finding:
    """Check that learner and engine agree on tokens that the present weights have sampled."""
    alarm = float(run.settings["learner"]["mismatch_alarm"])
    seen = _by_step(run, FRESH_MISMATCH)
    off = [f"update {step} ({difference:.2g})" for step, difference in seen.items() if difference > alarm]
    most = max(seen.values(), default=0.0)
    text = (
        f"the learner finds the log-probabilities of {len(seen)} updates again, within {most:.1g} on average"
    )
    return _finding(off, text, "sampled by other weights than they say")


def updates_were_made(run: RunRecords) -> Finding:
    """Check that there is an update to judge the run by, unless it plays nothing."""
    if set(run.settings["stages"]) <= OFFLINE:
        return Finding(True, f"the run plays nothing in its stages: {', '.join(run.settings['stages'])}")
    if run.consumed:
        return Finding(True, f"{run.consumed[-1]['step']} updates were made")
    return Finding(False, "no update was made: there is nothing to judge the run by")


def is_complete(run: RunRecords) -> Finding:
    """Check that a run which has ended, and was not interrupted by a person, has made all of its updates."""
    made, planned = _num_made(run), num_planned(run.settings)
    text = f"the run has ended after {made} of {planned} updates"
    return Finding(True, text) if made >= planned else Finding(False, f"{text}: its last lines say why")


def score_reached(run: RunRecords, score: float) -> Finding:
    """Check that the newest evaluation has a mean reward of at least ``score``."""
    scores = [record[SCORE] for record in run.metrics if SCORE in record]
    if not scores:
        return Finding(False, f"no evaluation is recorded, and {score:g} was asked for: set evaluation.every")
    return Finding(scores[-1] >= score, f"held-out reward is {scores[-1]:.3f}, {score:g} was asked for")


def num_planned(settings: dict[str, Any]) -> int:
    """Updates of the stages that roll out. A stage of somebody's own is not counted."""
    return sum(
        int(settings[SECTIONS[stage]]["num_steps"]) for stage in settings["stages"] if stage in SECTIONS
    )


CHECKS: tuple[Callable[[RunRecords], Finding], ...] = (
    each_rollout_once,
    no_rollout_lost,
    staleness_within_bound,
    versions_ascend,
    tokens_are_of_their_version,
    updates_were_made,
)


def _num_made(run: RunRecords) -> int:
    return max((record["step"] for record in run.consumed), default=0)


def _has_ended(run: RunRecords) -> bool:
    """Return whether all updates are made; of a stage of somebody's own, nobody knows the number."""
    known = set(run.settings["stages"]) <= {*SECTIONS, *OFFLINE}
    return known and _num_made(run) >= num_planned(run.settings)


def _by_step(run: RunRecords, name: str) -> dict[int, float]:
    return {int(record["step"]): record[name] for record in run.metrics if name in record}


def _consumed(run: RunRecords) -> Iterator[str]:
    for record in run.consumed:
        yield from record["trained"]
        for dropped in record["dropped"].values():
            yield from dropped


def _finding(wrong: list[str], sound: str, fault: str) -> Finding:
    if not wrong:
        return Finding(True, sound)
    more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
    return Finding(False, f"{fault}: {', '.join(wrong[:MOST_NAMED])}{more}")
