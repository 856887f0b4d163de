"""The bounds in the tree of settings, each at its limit and beyond: a new field's bound is tested too."""

from __future__ import annotations

import math
import re
from functools import reduce
from typing import get_type_hints

import pytest

from environments.bounds import Leaf, check_bounds, leaves
from environments.errors import ConfigError
from launch.settings.compose import as_train_config
from launch.settings.tree import TrainConfig
from launch.validation.settings import check_settings

LEAVES = list(leaves(TrainConfig()))

WITHOUT_BOUND = {
    "run.stop_at": "a metric may be any number",
    "expert_iteration.min_reward": "an environment's rewards may be any numbers",
    "server.access.per_minute": "access_keys checks every limit",
    "selection.reward_range": "an environment's rewards may be any numbers",
}
"""Settings that are numbers and have no bound, with the reason."""


def type_of(leaf: Leaf) -> str:
    """``int``, ``float | None``, ``list[float]``: as it is declared."""
    kind = get_type_hints(leaf.owner)[leaf.declaration.name]
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def is_whole(leaf: Leaf) -> bool:
    return "int" in type_of(leaf)


def next_to(leaf: Leaf, limit: float, direction: float) -> float:
    return limit + (1 if direction > 0 else -1) if is_whole(leaf) else math.nextafter(limit, direction)


def limits() -> list[tuple[Leaf, float, float]]:
    """For each limit of each setting: the last value that it may have, and the first that it may not."""
    found: list[tuple[Leaf, float, float]] = []
    for leaf in LEAVES:
        bound = leaf.bound
        if bound.at_least is not None:
            found.append((leaf, bound.at_least, next_to(leaf, bound.at_least, -math.inf)))
        if bound.above is not None:
            found.append((leaf, next_to(leaf, bound.above, math.inf), bound.above))
        if bound.at_most is not None:
            found.append((leaf, bound.at_most, next_to(leaf, bound.at_most, math.inf)))
        if bound.below is not None:
            found.append((leaf, next_to(leaf, bound.below, -math.inf), bound.below))
    return found


def config_with(leaf: Leaf, value: object) -> TrainConfig:
    config = as_train_config(TrainConfig())
    *sections, name = leaf.name.split(".")
    if leaf.bound.length is not None:
        value = [value] * leaf.bound.length
    elif isinstance(leaf.value, list):
        value = [value]
    setattr(reduce(getattr, sections, config), name, value)
    return config


def name_of(parameter: object) -> str | None:
    return parameter.name if isinstance(parameter, Leaf) else None


@pytest.mark.slow
@pytest.mark.parametrize(("leaf", "inside", "outside"), limits(), ids=name_of)
def test_number_is_checked_at_its_limit_and_beyond(leaf: Leaf, inside: float, outside: float) -> None:
    check_bounds(config_with(leaf, inside))
    with pytest.raises(ConfigError, match=rf"^{re.escape(leaf.name)}(\[0\])?={outside} has to be "):
        check_settings(config_with(leaf, outside))


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if "float" in type_of(leaf)], ids=name_of)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_is_finite(leaf: Leaf, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(leaf.name)}(\[0\])?={value} has to be a finite"):
        check_settings(config_with(leaf, value))


@pytest.mark.slow
@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.bound.one_of], ids=name_of)
def test_word_is_one_of_its_choices(leaf: Leaf) -> None:
    for choice in leaf.bound.one_of:
        check_bounds(config_with(leaf, choice))
    wrong = leaf.bound.one_of[0][:-1] + "_"
    message = rf"='{wrong}' is not one of .*Did you mean '{leaf.bound.one_of[0]}'"
    with pytest.raises(ConfigError, match=rf"^{re.escape(leaf.name)}(\[0\])?{message}"):
        check_settings(config_with(leaf, wrong))


def test_every_number_has_a_bound_or_a_reason_for_none() -> None:
    numbers = {leaf.name: leaf for leaf in LEAVES if is_whole(leaf) or "float" in type_of(leaf)}
    unbounded = {name for name, leaf in numbers.items() if not str(leaf.bound)}
    assert unbounded == set(WITHOUT_BOUND)
    assert len(numbers) > 50


def test_settings_are_at_most_109_and_those_of_later_issues() -> None:
    later = {
        "server.agents.unknown_history",
        "server.colocated",
        *(f"rollout.forks.{name}" for name in ("roots", "at")),
        *(f"server.recording.{name}" for name in ("folder", "keep_days", "readers")),
        *(f"preferences.{name}" for name in ("num_steps", "pairs_per_step", "beta", "optimizer")),
        *(f"preferences.{name}" for name in ("sft_coef", "held_out_pairs")),
        "fleet.pairs_per_actor",
        *("dataset", "held_out", "agent", "reward", "demonstrations"),
        *(f"warm_start.{name}" for name in ("num_epochs", "held_out_share")),
        *(f"run.{name}" for name in ("trackers", "stop_metric", "stop_at")),
        *(f"evaluation.{name}" for name in ("temperature", "top_p")),
    }
    assert later <= {leaf.name for leaf in LEAVES} and len(LEAVES) <= 109 + len(later)
