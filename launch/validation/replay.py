"""Checks of a replay: its recording is whole, and no setting asks for an engine."""

from __future__ import annotations

from pathlib import Path

from environments.errors import ConfigError
from launch.config import TrainConfig
from launch.run_folder.trajectory_log import TRAIN, kept_steps, read_kept


def check_replay(config: TrainConfig) -> None:
    """Check that a replay has its recording, and no setting that only an engine can act on.

    Raises:
        ConfigError: names the setting and the remedy.
    """
    if config.run.replay is None:
        return
    for name, value, usual in (
        ("rollout.max_staleness", config.rollout.max_staleness, 0),
        ("server.http_port", config.server.http_port, None),
        ("evaluation.every", config.evaluation.every, 0),
        ("evaluation.num_replicas", config.evaluation.num_replicas, 0),
        ("run.best_metric", config.run.best_metric, None),
    ):
        if value != usual:
            raise ConfigError(f"{name}={value} needs an engine, and run.replay starts none: leave it out.")
    check_recording(Path(config.run.replay), config.run.num_steps)


def check_recording(folder: Path, num_updates: int) -> None:
    """Check that the run in ``folder`` has kept the rollouts of its first ``num_updates`` updates.

    Raises:
        ConfigError: it has not, or is no run.
    """
    kept = kept_steps(folder, TRAIN)
    setting = f"run.replay={folder}"
    if not kept:
        raise ConfigError(f"{setting} holds no trajectories: name the folder of a run that has kept some.")
    if kept[0] != 1:
        raise ConfigError(
            f"{setting} has kept the rollouts of updates {kept[0]} to {kept[-1]} only, and a replay begins "
            "with the first: record the run with a higher run.trajectories_kept."
        )
    if kept[-1] < num_updates:
        raise ConfigError(f"{setting} has made {kept[-1]} updates: set run.num_steps={kept[-1]} or less.")
    if any(step.completion is None for each in read_kept(folder, TRAIN, 1) for step in each.trajectory.steps):
        raise ConfigError(f"{setting} has turns without tokens: replay another run.")
