"""Training from rewards that came after their rollouts had ended: groups of a past run, to learn from again.

``python -m launch.recipes.late_rewards runs/a late_rewards runs/late`` writes the groups of runs/a that have
such rewards, with the tokens, log-probabilities and versions of their sampling. ``run.replay=runs/late``
learns from them, off-policy. Members that runs/a has learned from are compared with, and not trained again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from environments.command_name import command_parser, explained
from environments.data.late_rewards import LateRewards
from environments.data.trajectory_json import Json
from environments.types import Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.recipes.feedback import report, write_groups
from launch.run_folder.trajectory_log import BASELINE, TRAIN, TRAINED, KeptTrajectory, kept_steps
from launch.training.recording import by_group, group_of
from launch.training.rollout_requests import group_name
from policies.learning.samples import is_judged


def late_groups(past: Path, rewards: Mapping[str, Json]) -> list[TrajectoryGroup]:
    """The groups of a run of which a member was judged later, without the members that nobody has judged."""
    groups: list[TrajectoryGroup] = []
    for step in kept_steps(past, TRAIN):
        for _, kept in sorted(by_group(past, step).items()):
            late = [_judged_later(each.trajectory, rewards) for each in kept]
            members = [
                replace(each, trajectory=whole or _as_compared(each))
                for each, whole in zip(kept, late, strict=True)
                if whole or is_judged(each.trajectory) or each.outcome == BASELINE
            ]
            if any(late) and any(each.outcome != BASELINE for each in members):
                groups.append(group_of(group_name(len(groups)), members))
    return groups


def _as_compared(kept: KeptTrajectory) -> Trajectory:
    """The trajectory, from which nothing is learned where the past run has done so."""
    return replace(kept.trajectory, masked=kept.trajectory.masked or kept.outcome == TRAINED)


def _judged_later(trajectory: Trajectory, rewards: Mapping[str, Json]) -> Trajectory | None:
    """The trajectory with its late reward, if it has one that fits."""
    if trajectory.termination_reason is not TerminationReason.JUDGED_LATER:
        return None
    steps = trajectory.steps
    result = rewards.get(steps[-1].info.get("session", ""), {})
    whole = [*[0.0] * (len(steps) - 1), result["reward"]] if "reward" in result else []
    given = result.get("rewards", whole)
    if len(given) != len(steps):
        return None
    return replace(
        trajectory,
        steps=[_rewarded(step, reward) for step, reward in zip(steps, given, strict=True)],
        reward=math.fsum(filter(None, given)),
        is_correct=result.get("is_correct"),
        by_reward_function=result.get("is_correct") is not None,
        termination_reason=TerminationReason.ENV_DONE,
    )


def _rewarded(step: Step, reward: float | None) -> Step:
    left_out = {"left_out": True} if reward is None else {}
    return replace(step, reward=float(reward or 0.0), info={**step.info, **left_out})


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = command_parser("launch.recipes.late_rewards", __doc__)
    options.add_argument("past", type=Path, help="folder of the run whose rollouts were judged later")
    options.add_argument("rewards", type=Path, help="folder of late rewards of its session server")
    options.add_argument("run", type=Path, help="a new folder for the rollouts")
    options.add_argument("--groups-per-step", type=int, default=8, help="rollout.groups_per_step")
    given = options.parse_args(arguments)
    rewards = LateRewards(given.rewards).read()
    groups = late_groups(given.past, rewards)
    steps = (step for group in groups for each in group.rollouts for step in each.steps)
    if others := rewards.keys() - {step.info.get("session") for step in steps}:
        sys.stdout.write(f"{len(others)} rewards fit no rollout that {given.past} has kept.\n")
    found = f"{given.rewards} has rewards for rollouts of {given.past} to"
    written = write_groups(groups, given.run, given.groups_per_step, found)
    report(written, "rollouts", given.run, given.groups_per_step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
