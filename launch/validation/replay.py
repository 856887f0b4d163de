"""Checks of a replay: its recording is whole and of this model, and no setting asks for an engine."""

from __future__ import annotations

from pathlib import Path

from environments.errors import ConfigError
from environments.types import Completion
from launch.run_folder.trajectory_log import TRAIN, first_completions, kept_steps
from launch.settings.tree import TrainConfig, changed


def check_replay(config: TrainConfig, num_updates: int) -> None:
    """Check that a replay has its recording, and no setting that only an engine can act on.

    Args:
        num_updates: policy updates of all stages.

    Raises:
        ConfigError: names the setting and the remedy.
    """
    if config.run.replay is None:
        return
    of_evaluations = ("evaluation.every", "evaluation.num_replicas", "run.best_metric")
    for setting in changed(config, "rollout.max_staleness", "server.http_port", *of_evaluations):
        raise ConfigError(f"{setting} needs an engine, and run.replay starts none: leave it out.")
    recorded = Path(config.run.replay)
    if recorded.resolve() == Path(config.run.directory).resolve():
        raise ConfigError(
            f"run.replay={recorded} is run.directory too, and this run would overwrite its own recording: "
            "name another run.directory."
        )
    check_recording(recorded, num_updates)


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
        raise ConfigError(
            f"{setting} has made {kept[-1]} updates, and this run would make {num_updates}: lower "
            f"run.num_steps, or expert_iteration.num_steps, by {num_updates - kept[-1]}."
        )
    if missing := set(range(1, num_updates + 1)) - set(kept):
        raise ConfigError(
            f"{setting} lacks the rollouts of update {min(missing)}: copy its trajectories whole, or make "
            f"{min(missing) - 1} updates."
        )
    _check_tokens(setting, first_completions(folder))


def _check_tokens(setting: str, completions: list[Completion]) -> None:
    if not completions:
        raise ConfigError(f"{setting} has turns without tokens: replay another run.")
    if policies := sorted({each.policy for each in completions} - {""}):
        raise ConfigError(
            f"{setting} was played by the policies {', '.join(policies)}, and a replay trains one: replay "
            "another run."
        )
    if any(each.retokenized or not each.prompt_ids for each in completions):
        raise ConfigError(f"{setting} has tokens that are not the engine's: replay another run.")
    if any(len(each.logprobs) != len(each.completion_ids) for each in completions):
        raise ConfigError(
            f"{setting} has sampled tokens without log-probabilities, which every algorithm compares the "
            "learner's with: replay another run."
        )
