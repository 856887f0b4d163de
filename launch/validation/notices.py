"""Notices on a valid configuration: sentences for the run's output."""

from __future__ import annotations

import os

from actors.ray_tools.job import in_job
from launch.settings.tree import TrainConfig, algorithm_of, is_exact
from policies.learning.settings import CorrectionConfig

STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's environment variable: for so many seconds `ray job stop` waits, 3 by default."""


def notices(config: TrainConfig) -> list[str]:
    """One sentence for each default or choice that may surprise. ``config`` has passed the checks."""
    return [*_job_notices(), *_correction_notices(config)]


def _job_notices() -> list[str]:
    if not in_job() or STOP_VARIABLE in os.environ:
        return []
    return [
        "`ray job stop` kills this job after 3 s, which may be too soon for a checkpoint: submit it with "
        f"""--runtime-env-json '{{"env_vars": {{"{STOP_VARIABLE}": "600"}}}}'."""
    ]


def _correction_notices(config: TrainConfig) -> list[str]:
    staleness, algorithm = config.rollout.max_staleness, algorithm_of(config)
    if config.run.replay is not None:
        played = f"The rollouts are those of {config.run.replay}: nothing is played, and nothing evaluated."
        if algorithm.correction_level is None and not algorithm.bypass:
            played += " Other weights have sampled them, which nothing corrects (see algorithm.correction)."
        return [played]
    is_rounded = not is_exact(config) and "reinforce" in config.stages
    if staleness:
        why = f"rollout.max_staleness={staleness} trains on tokens of policies up to {staleness} updates old"
    else:
        why = (
            f"learner.dtype={config.learner.dtype} with server.engine.options.dtype="
            f"{config.server.engine.dtype}: engine and learner round the probabilities of tokens differently"
        )
    if algorithm.bypass or not (staleness or is_rounded):
        return []
    if not algorithm.policy_loss.uses_weights:
        return [f"{why}, and the loss {algorithm.loss} takes no importance weights: nothing corrects that."]
    if algorithm.correction_level is None:
        return [
            f"{why}, and algorithm.correction.level=none corrects nothing: a run may learn worse. The "
            "default is algorithm.correction.level=token with truncate_above=2."
        ]
    if config.algorithm.correction == CorrectionConfig():
        return [
            f"{why}. By default each token's loss is multiplied by an importance weight of at most "
            f"{algorithm.truncate_above:g}; algorithm.correction.level=none switches that off."
        ]
    return []
