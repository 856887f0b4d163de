"""A run by its folder, as far as its updates can be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.errors import ConfigError, TroupeError
from environments.types import TrajectoryGroup
from launch.reporting.tracker import SETTINGS, read_metrics, read_settings
from launch.run_folder.checkpoint import CheckpointFolder, Progress, step_of
from launch.run_folder.model_paths import model_folder
from launch.run_folder.trajectory_log import TRAIN, kept_steps
from launch.settings.compose import with_overrides
from launch.settings.tree import TASKS, TrainConfig
from launch.training.recording import recorded_groups
from launch.training.stages.base import Stage
from launch.training.stages.chosen import chosen_stages
from launch.training.stages.policy_update import PolicyUpdateStage


@dataclass(frozen=True)
class Beginning:
    """A state of a run from which its updates can be computed again."""

    checkpoint: Path | None
    """Folder of a checkpoint; ``None`` for the model that the run began with."""
    progress: Progress

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "the model that the run began with"
        return f"the checkpoint of step {self.progress.step}"


class PastRun:
    """A run that has made updates, and may still be going on. Nothing of it is written.

    Args:
        folder: of the run.

    Raises:
        TroupeError: it holds no run, or its settings are damaged, or of an earlier state of this program.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _, self._settings = read_settings(folder)
        try:
            self.config = self.config_with(())
        except ConfigError as error:
            raise ConfigError(f"{folder / SETTINGS}: {error}") from error
        self._checkpoints = CheckpointFolder(folder, self.config.run.saving.kept)
        self._metrics = {
            int(record["step"]): {name: value for name, value in record.items() if name != "step"}
            for record in read_metrics(folder)
            if "learn/num_optimizer_steps" in record
        }

    def config_with(self, overrides: Sequence[str]) -> TrainConfig:
        """The run's configuration, in which ``overrides`` have changed something."""
        return with_overrides(self._settings, overrides)

    def model_path(self) -> str:
        """Folder of the model that the run began with."""
        path = self.config.model.path
        return str((self.folder / "model").resolve()) if path is None else model_folder(path)

    def beginning_before(self, update: int) -> Beginning:
        """The last state before ``update``, from which that is computed again with the fewest others.

        Raises:
            TroupeError: the run has not made that update, has kept no state before it, or not the rollouts
                since then; names the setting that says how many it keeps.
        """
        last = max(self._metrics, default=0)
        if not 1 <= update <= last:
            raise TroupeError(f"{self.folder} has made {last} updates: --update {update} is none of them.")
        beginning = self._last_state(update)
        kept = set(kept_steps(self.folder, TRAIN))
        needed = range(beginning.progress.step + 1, update + 1)
        if missing := [step for step in needed if step not in kept]:
            raise TroupeError(
                f"Update {update} is computed again from {beginning} of {self.folder}, and of the updates "
                f"since, {missing[0]} has lost its rollouts. run.trajectories_kept="
                f"{self.config.run.trajectories_kept} says of how many updates a run keeps them."
            )
        return beginning

    def _last_state(self, update: int) -> Beginning:
        saving = self.config.run.saving
        checkpoints = [each for each in self._checkpoints.all() if step_of(each) < update]
        if checkpoints:
            return Beginning(checkpoints[-1], CheckpointFolder.progress(checkpoints[-1]))
        if isinstance(chosen_stages(self.config)[0], PolicyUpdateStage):
            return Beginning(None, Progress.first(self.config.learner))
        oldest = min(map(step_of, self._checkpoints.all()), default=None)
        first = "it has none" if oldest is None else f"its oldest one is of step {oldest}"
        raise TroupeError(
            f"{self.folder} has no checkpoint from before update {update}: {first}. "
            f"run.checkpoints.every={saving.every} says after how many updates a run writes one, and "
            f"run.checkpoints.kept={saving.kept} how many of them it keeps."
        )

    def groups(self, update: int) -> list[TrajectoryGroup]:
        """The groups that ``update`` took, in the order in which it took those that it learned from."""
        groups = recorded_groups(self.folder, update)
        if self.config.rollout.group_order == TASKS:  # all of them, then
            groups.sort(key=lambda group: group.group_id)
        return groups

    def metrics(self, update: int) -> dict[str, float]:
        """The metrics that the run has recorded of ``update``; none if it was killed before."""
        return self._metrics.get(update, {})

    def checkpoint_of(self, update: int) -> Path | None:
        """The checkpoint that was written right after ``update``, if it is there."""
        found = (each for each in self._checkpoints.all() if step_of(each) == update)
        return next(found, None)


def stage_of_next_update(stages: Sequence[Stage], progress: Progress) -> PolicyUpdateStage:
    """The stage that makes the update after ``progress``.

    Raises:
        TroupeError: a stage of another kind stands before it, whose steps no run records.
    """
    left = [each for each in stages if progress.stage_steps.get(each.name, 0) < each.num_steps]
    if left and isinstance(left[0], PolicyUpdateStage):
        return left[0]
    name = left[0].name if left else "none of its stages"
    raise TroupeError(
        f"Update {progress.step + 1} comes after {name}, which is not recorded: only updates of reinforce "
        "and expert_iteration are computed again, from a checkpoint after other stages."
    )
