"""Requirements of a run on the policies that its agent names, where these are several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from environments.errors import ConfigError, TroupeError
from environments.types import TrajectoryGroup
from launch.settings.tree import TrainConfig, changed
from launch.workload import Workload
from policies.model_files import HUGGINGFACE

OF_ONE_POLICY = ("server.colocated", "server.http_port", "run.replay", "preferences.num_steps")
"""Settings of runs of one policy."""


def check_policies(config: TrainConfig, policies: Sequence[str]) -> None:
    """Several policies have names, and no setting is for one policy only. Raises ``ConfigError``."""
    if policies == ("",):
        return
    are_names = all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in policies)
    if len(policies) < 2 or not are_names or len({*policies}) < len(policies):
        raise ConfigError(
            f"The agent has policies={policies}, which name folders of checkpoints: give two or more, of "
            "letters, digits, '_' and '-', and each once; or leave them out to train one."
        )
    for setting in changed(config, *OF_ONE_POLICY):
        raise ConfigError(
            f"{setting} is for a run of one policy, and the agent names {', '.join(policies)}: leave it out, "
            "or let one policy play all seats."
        )


def check_one_policy(workload: Workload) -> None:
    """The agent is played by the model that a command is given. Raises ``ConfigError``."""
    if workload.policies != ("",):
        raise ConfigError(
            f"The agent is played by the policies {', '.join(workload.policies)}, and this command has one "
            "model: evaluations of its training play it by all of them (evaluation.every)."
        )


def check_checkpoint(checkpoint: Path | None, policies: Sequence[str]) -> None:
    """A checkpoint to go on from holds the policies of the run. Raises ``ConfigError``."""
    if checkpoint is None:
        return
    for name in policies:
        folder = checkpoint / name / HUGGINGFACE
        if not folder.is_dir():
            raise ConfigError(
                f"The agent names the policies {', '.join(map(repr, policies))}, and {folder} is not there: "
                "the run was begun with others. Name the same ones, or begin a new run.directory."
            )


def check_turns(groups: Iterable[TrajectoryGroup]) -> None:
    """Groups were sampled by the one policy of their run. Raises ``TroupeError``."""
    turns = (turn for group in groups for each in group.trajectories for turn in each.completions)
    if names := sorted({turn.policy for turn in turns} - {""}):
        raise TroupeError(
            f"The run has trained the policies {', '.join(names)}, and an update is computed again of a run "
            "with one policy only."
        )


def for_all_policies(config: TrainConfig, policies: Sequence[str]) -> TrainConfig:
    """The configuration by which to count the ranks and engines of ``policies``."""
    learner, server, evaluation, number = config.learner, config.server, config.evaluation, len(policies)
    return replace(
        config,
        learner=replace(learner, num_workers=learner.num_workers * number),
        server=replace(server, num_replicas=server.num_replicas * number),
        evaluation=replace(evaluation, num_replicas=evaluation.num_replicas * number),
    )
