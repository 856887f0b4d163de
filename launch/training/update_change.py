"""A change to an update whose rollouts are there: other settings, other rewards, or a group less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from environments.errors import ConfigError
from environments.named_module import load_function
from environments.regrading import regraded_group
from environments.rewards.judge import graded
from environments.types import TrajectoryGroup
from launch.settings.compose import named_settings
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.past_run import PastRun
from launch.training.rollout_requests import group_name
from launch.validation.settings import check_training_settings

SECTIONS = ("algorithm", "learner", "selection")
"""Settings on which an update depends whose rollouts are there."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to one update: other settings, other rewards, or a group less."""

    overrides: Sequence[str] = ()
    reward: str | None = None
    """Reward function, as "module:function"."""
    without: int | None = None
    """Number of a group."""

    @property
    def is_none(self) -> bool:
        """Return whether nothing is changed."""
        return not self.overrides and self.reward is None and self.without is None

    def __str__(self) -> str:
        reward = [f"the rewards of {self.reward}"] if self.reward else []
        without = [f"no group {group_name(self.without)}"] if self.without is not None else []
        return ", ".join([*self.overrides, *reward, *without])

    def config(self, run: PastRun) -> TrainConfig:
        """The run's configuration with this change.

        Raises:
            ConfigError: a setting has no effect on an update, or needs what the run has not recorded.
        """
        for name in named_settings(self.overrides):
            if name.partition(".")[0] not in SECTIONS:
                raise ConfigError(
                    f"{name} has no effect on an update whose rollouts are there: leave it out. Settings of "
                    f"{', '.join(SECTIONS)} have one."
                )
        config = run.config_with(self.overrides)
        if self.overrides:  # those of the run were checked when it began
            check_training_settings(config)
        before, now = algorithm_of(run.config), algorithm_of(config)
        for part, is_new in (
            ("a critic", now.uses_critic > before.uses_critic),
            ("a reference policy", now.uses_reference > before.uses_reference),
            ("greedy rollouts", now.uses_greedy_baseline > before.uses_greedy_baseline),
        ):
            if is_new:
                raise ConfigError(
                    f"algorithm.name={now.name} needs {part}, and {run.folder} has none: train with it from "
                    f"the start, on the same rollouts with run.replay={run.folder}."
                )
        return config

    def groups(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups of an update with this change.

        Raises:
            ConfigError: there is no such reward function, or the update has no such group.
            EnvironmentFailure: it gives no verdict, such as a judge that cannot be reached.
        """
        changed = list(groups)
        if self.reward is not None:
            reward_fn = load_function(f"--reward {self.reward}", self.reward)
            changed = graded(lambda each: regraded_group(each, reward_fn), groups, reward_fn)
        if self.without is None:
            return changed
        name = group_name(self.without)
        if name not in {each.group_id for each in groups}:
            names = ", ".join(each.group_id for each in groups)
            raise ConfigError(f"--without {self.without}: the update has the groups {names}.")
        return [masked_group(each) if each.group_id == name else each for each in changed]


def masked_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """``group``, of which nothing is learned and which therefore counts nowhere."""
    return replace(group, trajectories=tuple(replace(each, masked=True) for each in group.trajectories))
