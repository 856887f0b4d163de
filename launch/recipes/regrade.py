"""Rollouts of a past run with other rewards: what changes, and a folder to learn from.

``python -m launch.recipes.regrade runs/a runs/b --reward my_rewards:strict`` grades the rollouts that runs/a
has kept by another reward function, or by a judge. ``run.replay=runs/b`` learns from them, with the tokens,
log-probabilities and versions of their sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from environments.command_name import command_parser, explained
from environments.errors import TroupeError
from environments.named_module import load_function
from environments.regrading import regraded_group
from environments.rewards.base import RewardFunction
from environments.rewards.judge import graded
from environments.types import TrajectoryGroup
from launch.recipes.feedback import report, write_groups
from launch.run_folder.trajectory_log import TRAIN, kept_steps
from launch.training.recording import by_group, group_of
from launch.training.rollout_requests import group_name
from policies.learning.samples import is_judged


def kept_groups(past: Path) -> list[TrajectoryGroup]:
    """The groups that a run has kept, in the order of its updates, also those that an update left out.

    Raises:
        TroupeError: it has kept none.
    """
    found = [kept for step in kept_steps(past, TRAIN) for _, kept in sorted(by_group(past, step).items())]
    if not found:
        raise TroupeError(
            f"{past} has kept no rollouts: name the folder of a run with run.trajectories_kept."
        )
    return [group_of(group_name(number), kept) for number, kept in enumerate(found)]


def regraded_groups(groups: Sequence[TrajectoryGroup], reward_fn: RewardFunction) -> list[TrajectoryGroup]:
    """The groups with the rewards of ``reward_fn``; a judge grades many at once.

    Raises:
        EnvironmentFailure: it gives no verdict on one of them.
    """
    return graded(lambda each: regraded_group(each, reward_fn), groups, reward_fn)


def changes(before: Sequence[TrajectoryGroup], after: Sequence[TrajectoryGroup]) -> str:
    """Number and mean of the rewards that have changed, in a sentence."""
    pairs = [
        (old, new)
        for one, other in zip(before, after, strict=True)
        for old, new in zip(one.trajectories, other.trajectories, strict=True)
        if is_judged(old) and is_judged(new)
    ]
    if not pairs:
        return "No rollout has a reward before and now."
    others = sum(old.reward != new.reward for old, new in pairs)
    won, lost = (sum(new.succeeded - old.succeeded == sign for old, new in pairs) for sign in (1, -1))
    was, now = (fmean(each[place].reward for each in pairs) for place in (0, 1))
    return (
        f"{others} of {len(pairs)} rewards are others, and their mean is {now:.4g} instead of {was:.4g}; "
        f"{won} rollouts became successes, {lost} are none any more."
    )


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = command_parser("launch.recipes.regrade", __doc__)
    options.add_argument("past", type=Path, help="folder of the run whose rollouts are graded")
    options.add_argument("run", type=Path, help="a new folder for them")
    options.add_argument("--reward", required=True, metavar="MODULE:NAME", help="a reward function or judge")
    options.add_argument("--groups-per-step", type=int, default=8, help="rollout.groups_per_step")
    given = options.parse_args(arguments)
    reward_fn = load_function(f"--reward {given.reward}", given.reward)
    before = kept_groups(given.past)
    after = regraded_groups(before, reward_fn)
    sys.stdout.write(f"{changes(before, after)}\n")
    found = f"{given.past} has kept rollouts to"
    written = write_groups(after, given.run, given.groups_per_step, found)
    report(written, "rollouts", given.run, given.groups_per_step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
