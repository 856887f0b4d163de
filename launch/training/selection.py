"""Which groups are trained on, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection

from environments.types import Trajectory, TrajectoryGroup
from launch.config import TrainConfig
from policies.learning.algorithm import Algorithm
from policies.learning.samples import has_signal, is_judged

TOO_FEW_MEMBERS = "too_few_members"
STALE = "stale"
TOO_HARD = "too_hard"
TOO_EASY = "too_easy"
ZERO_SIGNAL = "zero_signal"
REASONS = (TOO_FEW_MEMBERS, STALE, TOO_HARD, TOO_EASY, ZERO_SIGNAL)


def reason_to_drop(
    group: TrajectoryGroup, version: int, config: TrainConfig, algorithm: Algorithm
) -> str | None:
    """Why ``group`` is not trained on by the update that follows ``version``; ``None`` if it is.

    That infrastructure has spoilt a member says nothing about the policy, and a group without it is another,
    smaller group: it is dropped whole unless ``selection.min_members`` allows for it.
    """
    selection = config.selection
    judged = [each for each in group.trajectories if is_judged(each)]
    if len(judged) < (selection.min_members or len(group.trajectories)):
        return TOO_FEW_MEMBERS
    if group.baseline is not None and not is_judged(group.baseline):
        return TOO_FEW_MEMBERS
    # The feed's slots keep groups from becoming stale. This is the check that they do.
    if version - min(map(oldest_version, judged), default=version) > config.rollout.max_staleness:
        return STALE
    mean = sum(each.reward for each in judged) / len(judged)
    if selection.min_reward is not None and mean < selection.min_reward:
        return TOO_HARD
    if selection.max_reward is not None and mean > selection.max_reward:
        return TOO_EASY
    if algorithm.zero_signal_groups == "refill" and not has_signal(group, algorithm):
        return ZERO_SIGNAL
    return None


def mask(group: TrajectoryGroup, reasons: Collection[str]) -> None:
    """Mark the trajectories that ended for one of ``reasons``: nothing is learnt from their tokens."""
    for trajectory in group.trajectories:
        trajectory.masked = trajectory.masked or trajectory.termination_reason in reasons


def oldest_version(trajectory: Trajectory) -> float:
    """The oldest policy version that sampled any of its tokens; infinite if nothing was sampled."""
    versions = [each.policy_version for each in trajectory.completions]
    return min(versions, default=float("inf"))
