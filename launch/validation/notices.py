"""What a user should know of a configuration that is valid: sentences for the run's output."""

from __future__ import annotations

from launch.config import TrainConfig
from policies.learning.correction import USUAL_TRUNCATION
from policies.learning.settings import CorrectionConfig


def notices(config: TrainConfig) -> list[str]:
    """One sentence for each default or choice that may surprise. ``config`` has passed the checks."""
    correction, staleness = config.algorithm.correction, config.rollout.max_staleness
    if not staleness:
        return []
    older = f"rollout.max_staleness={staleness} trains on tokens of policies up to {staleness} updates old"
    if correction == CorrectionConfig():
        return [
            f"{older}. By default each token's loss is multiplied by an importance weight of at most "
            f"{USUAL_TRUNCATION:g}; algorithm.correction.level=none switches that off."
        ]
    if correction.level == "none":
        return [
            f"{older}, and algorithm.correction.level=none corrects nothing: a run may learn worse. The "
            f"default is algorithm.correction.level=token with truncate_above={USUAL_TRUNCATION:g}."
        ]
    return []
