"""Settings of an algorithm that would change nothing, with the reason for each."""

from __future__ import annotations

from collections.abc import Collection

from environments.errors import ConfigError
from policies.learning.registry import Definition, Estimator, Loss
from policies.learning.settings import AlgorithmConfig


def check_effect(
    config: AlgorithmConfig, definition: Definition, estimator: Estimator, loss: Loss, names: Collection[str]
) -> None:
    """Find a setting that was set and has no effect in the algorithm of ``definition``.

    ``names`` are those of all algorithms.

    Raises:
        ConfigError: names the setting, its value, and why.
    """
    effects = _effects(config, definition, estimator, loss)
    for setting, (effective, why) in effects.items():
        value = vars(config)[setting]
        if value is not None and not effective:
            named = f" Or set algorithm.name={value}." if setting == "advantage" and value in names else ""
            raise ConfigError(
                f"algorithm.{setting}={value!r} has no effect in algorithm.name={config.name!r}: {why}. "
                f"Leave it out; where a recipe sets it, set algorithm.{setting}=null.{named}"
            )
    level = config.correction.level
    weights = (loss.uses_weights, "importance weights")
    ratio = (loss.uses_ratio, "ratio to old log-probabilities")
    has, means = ratio if level == "bypass" else weights
    if level not in (None, "none") and not has:
        raise ConfigError(
            f"algorithm.correction.level={level} has no effect in algorithm.name={config.name!r}: its loss "
            f"{definition.loss} has no {means}. Leave it out."
        )


def _effects(
    config: AlgorithmConfig, definition: Definition, estimator: Estimator, loss: Loss
) -> dict[str, tuple[bool, str]]:
    """Return by setting whether it has an effect, and why not."""
    custom = config.name == "custom"
    part = "that is part of the algorithm; algorithm.name=custom lets you choose"
    by_turn = "; it takes rewards at the turn that earned them as it is" if estimator.by_token else ""
    by_turn = " alone: it compares trajectories and turns as it is" if estimator.turns_by else by_turn
    return {
        "advantage": (custom, part),
        "loss": (custom, part),
        "clip_low": (loss.clips, f"its loss {definition.loss} does not clip"),
        "clip_high": (loss.clips, f"its loss {definition.loss} does not clip"),
        "loss_aggregation": (loss.aggregates, f"its loss {definition.loss} has its own"),
        "credit": (
            estimator.compares and estimator.turns_by is None,
            f"its estimator {definition.advantage} does not compare a turn with the same turn of other "
            f"rollouts{by_turn}",
        ),
        "gamma": (
            estimator.discounts or (estimator.compares and config.credit == "per_step"),
            "nothing is discounted" + (" unless algorithm.credit=per_step" if estimator.compares else ""),
        ),
        "zero_signal_groups": (
            estimator.compares,
            f"its estimator {definition.advantage} learns from groups whose members were all rewarded alike, "
            "too",
        ),
    }
