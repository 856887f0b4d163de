"""The groups of one update: taken in the order of the run, and replaced where one is dropped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from environments.errors import TroupeError
from environments.types import TrajectoryGroup
from launch.reporting.metrics import has_failed
from launch.reporting.tracker import Tracker
from launch.settings.tree import TrainConfig
from launch.training.rollouts import Rollouts, oldest_version
from policies.learning.algorithm import Algorithm
from policies.learning.samples import has_signal, is_judged

TOO_FEW_MEMBERS = "too_few_members"
STALE = "stale"
TOO_HARD = "too_hard"
TOO_EASY = "too_easy"
ZERO_SIGNAL = "zero_signal"
LEAST_GROUPS = 4
"""Groups that must all have failed before a run ends: one task that fails everywhere is set aside."""
REASONS = (TOO_FEW_MEMBERS, STALE, TOO_HARD, TOO_EASY, ZERO_SIGNAL)


@dataclass
class Selection:
    """The groups of one update, and those that were dropped on the way, by reason."""

    groups: list[TrajectoryGroup] = field(default_factory=list)
    zero_signal: list[TrajectoryGroup] = field(default_factory=list)
    """Members of ``groups`` without a signal, where the algorithm leaves them out and refills nothing."""
    dropped: dict[str, list[TrajectoryGroup]] = field(default_factory=lambda: {each: [] for each in REASONS})
    not_imitated: frozenset[str] = frozenset()
    """Ids of the rollouts of ``groups`` that a stage which imitates has left out."""

    @property
    def useful(self) -> list[TrajectoryGroup]:
        """Groups that are trained on."""
        zero_signal = {group.group_id for group in self.zero_signal}
        return [group for group in self.groups if group.group_id not in zero_signal]

    @property
    def unused(self) -> dict[str, list[TrajectoryGroup]]:
        """Groups that are not trained on, by reason."""
        return self.dropped | {ZERO_SIGNAL: self.dropped[ZERO_SIGNAL] + self.zero_signal}

    @property
    def taken(self) -> list[TrajectoryGroup]:
        """All groups of the update."""
        return [*self.groups, *self.all_dropped]

    @property
    def all_dropped(self) -> list[TrajectoryGroup]:
        return [group for groups in self.dropped.values() for group in groups]


def select_groups(
    config: TrainConfig, algorithm: Algorithm, rollouts: Rollouts, version: int, tracker: Tracker
) -> Selection:
    """The next groups of ``rollout.group_order``; another one is requested for each that is dropped.

    Args:
        version: of the policy that is going to learn from them.

    Raises:
        TroupeError: one rollout after the other has failed, and not a single one succeeded.
    """
    selection = Selection()
    wanted, max_dropped = config.rollout.groups_per_step, config.selection.max_dropped
    while len(selection.groups) < wanted and len(selection.taken) < wanted + max_dropped:
        if place(selection, rollouts.take(), version, config, algorithm) is None:
            continue
        check_any_succeeded(selection, max(wanted, LEAST_GROUPS))  # with many to drop, the end is far
        if len(selection.all_dropped) <= max_dropped:  # later ones keep their slots: nothing behind them ages
            rollouts.replace(num_selected=len(selection.groups))
    check_any_succeeded(selection, wanted)
    if len(selection.groups) < wanted:
        tracker.announce(
            f"selection.max_dropped={max_dropped} groups were replaced for this update, and more were "
            f"dropped: it makes do with {len(selection.groups)} of {wanted} groups."
        )
    tracker.failures(selection.taken)
    return selection


def place(
    selection: Selection, group: TrajectoryGroup, version: int, config: TrainConfig, algorithm: Algorithm
) -> str | None:
    """Put ``group`` among those of the update that follows ``version``, or among those that are dropped.

    Returns:
        The reason for which it is dropped; ``None`` if it is not.
    """
    mask(group, config.selection.masked_reasons)
    reason = reason_to_drop(group, version, config, algorithm)
    if reason is not None:
        selection.dropped[reason].append(group)
        return reason
    selection.groups.append(group)
    if algorithm.zero_signal_groups == "drop" and not has_signal(group, algorithm):
        selection.zero_signal.append(group)
    return None


def check_any_succeeded(selection: Selection, enough: int) -> None:
    """Raise ``TroupeError`` when there are ``enough`` groups, and not one rollout of them came to its end."""
    groups = selection.taken
    trajectories = [each for group in groups for each in group.trajectories]
    if len(groups) < enough or not all(map(has_failed, trajectories)):
        return
    raise TroupeError(f"All of {len(trajectories)} rollouts failed. The first: {trajectories[0].error}")


def reason_to_drop(
    group: TrajectoryGroup, version: int, config: TrainConfig, algorithm: Algorithm
) -> str | None:
    """Reason why ``group`` is not trained on by the update that follows ``version``; ``None`` if it is.

    That infrastructure has spoilt a member says nothing about the policy, and a group without it is another,
    smaller group: it is dropped whole unless ``selection.min_members`` allows for it.
    """
    selection = config.selection
    judged = [each for each in group.trajectories if is_judged(each)]
    if len(judged) < (selection.min_members or len(group.trajectories)):
        return TOO_FEW_MEMBERS
    if group.baseline is not None and not is_judged(group.baseline):
        return TOO_FEW_MEMBERS
    # Slots and order keep groups from becoming stale. This is the check that they do. The versions of a
    # recording are another run's: they say nothing of this one's policy.
    age = version - min(map(oldest_version, judged), default=version)
    if config.run.replay is None and age > config.rollout.max_staleness:
        return STALE
    mean = sum(each.reward for each in judged) / len(judged)
    low, high = selection.reward_range or (None, None)
    if low is not None and mean < low:
        return TOO_HARD
    if high is not None and mean > high:
        return TOO_EASY
    if algorithm.zero_signal_groups == "refill" and not has_signal(group, algorithm):
        return ZERO_SIGNAL
    return None


def mask(group: TrajectoryGroup, reasons: Collection[str]) -> None:
    """Mark the trajectories that ended for one of ``reasons``: nothing is learnt from their tokens."""
    for trajectory in group.trajectories:
        trajectory.masked = trajectory.masked or trajectory.termination_reason in reasons
