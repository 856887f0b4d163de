"""Settings of earlier versions: what stands for each now, so that older files and command lines still load.

A setting that has only moved is translated without a word. One whose value counts no more is named in a
warning, unless it has the value that is the rule now, as all have in the ``settings.yaml`` of a run's folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import reduce
from typing import Any

from environments.bounds import check_choice
from launch.settings.tree import OVERLONG, TrainConfig

logger = logging.getLogger(__name__)

Tree = Mapping[str, Any]
Settings = dict[str, Any]
"""Values by their dotted names, or a dict among them."""
MOVED: Mapping[str, tuple[str, object]] = {
    "fleet.num_cpus_per_actor": ("fleet.nodes:CPU", None),
    "server.num_cpus": ("server.nodes:CPU", None),
    "learner.lora.alpha": ("learner.verl:model.lora_alpha", 16),
    "server.access.requests_per_minute": ("server.access.per_minute:requests", None),
    "server.access.tokens_per_minute": ("server.access.per_minute:tokens", None),
    "algorithm.overlong_penalty": ("algorithm.overlong:penalty", None),
    "algorithm.overlong_buffer_tokens": ("algorithm.overlong:buffer_tokens", None),
    "learner.lora.target_modules": ("learner.verl:model.target_modules", "all-linear"),
    "run.checkpoint_to": ("run.checkpoints:to", ""),
    "run.checkpoint_every": ("run.checkpoints:every", 50),
    "run.checkpoints_kept": ("run.checkpoints:kept", 2),
    "learner.optimizer.betas": ("learner.verl:optimizer.betas", [0.9, 0.95]),
    "server.engine.cache_after_publish": ("server.engine.options:cache_after_publish", "recompute"),
    "server.engine.dtype": ("server.engine.options:dtype", "float32"),
    "server.engine.num_threads": ("server.engine.options:num_threads", None),
}
"""Names that became keys, behind the colon, of another setting; and the value that needs no key."""
PAIRS = {
    "algorithm.correction.mask_below": ("algorithm.correction.mask_outside", 0),
    "algorithm.correction.mask_above": ("algorithm.correction.mask_outside", 1),
    "selection.min_reward": ("selection.reward_range", 0),
    "selection.max_reward": ("selection.reward_range", 1),
}
"""Names of a lower and an upper bound, which are the two numbers of one list."""
GONE: Mapping[str, tuple[object, str]] = {
    "evaluation.show": (0, "the best and the worst are shown on a terminal, and all of them by launch.view"),
    "algorithm.kl.horizon": (10_000, "the adaptive controller corrects over 10,000 trajectories"),
    "fleet.failure_budget": (0.5, "a run ends when half of the last 200 rollouts failed in the environment"),
    "run.recovery_minutes": (10.0, "run.max_recoveries counts over ten minutes"),
    "run.stall_report_seconds": (120.0, "a report comes after a thirtieth of run.stall_limit_seconds"),
    "server.access.log_requests": (False, "requests with a key and those that failed are logged"),
    "server.access.max_open_requests": (256, "it is four times server.access.max_sampled_answers"),
}
"""Names whose value counts no more, each with the value that is the rule now, and the rule."""
SCHEDULES = ("constant", "cosine")
OPTIMIZERS = ("warm_start.optimizer", "expert_iteration.optimizer", "learner.critic")
"""Settings that were sections like ``learner.optimizer``."""
NODES = ("fleet.nodes", "learner.nodes", "server.nodes")
"""Settings that were sections with ``labels`` and ``resources``."""
DICTS = (*OPTIMIZERS, *NODES, "server.weights")
OTHERS = (
    "algorithm.correction.mode",
    "fleet.min_actors",
    "learner.optimizer.schedule",
    "rollout.overlong_filter",
    "server.access.public_url",
    *(f"{nodes}.{part}" for nodes in NODES for part in ("labels", "resources")),
)
NAMES = (*MOVED, *PAIRS, *GONE, *OTHERS)
"""All names that are no settings any more."""


def translated(settings: Tree) -> Settings:
    """Put what stands for them now in the place of settings of earlier versions.

    Args:
        settings: by their dotted names; ``None`` under a name of before means that it was not set.

    Raises:
        ConfigError: a value that the setting could not have.
    """
    result = _nested({name: value for name, value in settings.items() if name not in NAMES})
    before = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    for name, value in before.items():
        if name in MOVED:
            _move(result, *MOVED[name], value)
        elif name in PAIRS:
            pair, index = PAIRS[name]
            bounds = list(result.get(pair) or (None, None))
            bounds[index] = value
            result[pair] = bounds
        elif name in GONE and value != GONE[name][0]:
            logger.warning("%s=%s counts no more: %s.", name, value, GONE[name][1])
    _translate_optimizers(result, before)
    _translate_nodes(result, before)
    if isinstance(weights := result.get("server.weights"), Mapping) and "options" in weights:
        result["server.weights"] = {**weights, **weights["options"]}
        del result["server.weights"]["options"]
    _translate_fleet(result, before)
    if before.get("rollout.overlong_filter"):
        result["selection.masked_reasons"] = [*result.get("selection.masked_reasons", ()), OVERLONG]
    if address := before.get("server.access.public_url"):
        result["server.access.hosts"] = [*result.get("server.access.hosts", ()), address]
    if mode := before.get("algorithm.correction.mode"):
        check_choice("algorithm.correction.mode", mode, ("decoupled", "bypass"))
        if mode == "bypass":
            result["algorithm.correction.level"] = "bypass"
    return result


def _nested(settings: Tree) -> Settings:
    """Put keys of the dicts that were sections, which may be given by dotted names, into the dicts."""
    result: Settings = {}
    for name, value in settings.items():
        place = next((each for each in DICTS if name.startswith(f"{each}.")), None)
        if place is None:
            result[name] = value
        else:
            *sections, key = name.removeprefix(f"{place}.").split(".")
            _inner(result, place, sections)[key] = value
    return result


def _inner(settings: Settings, name: str, sections: Sequence[str]) -> Settings:
    """The dict behind ``sections`` in the one that is the setting ``name``: those that lack are made."""
    inner = settings[name] = deepcopy(dict(settings.get(name) or {}))
    for section in sections:
        inner = inner.setdefault(section, {})
    return inner


def _move(settings: Settings, place: str, usual: object, value: object) -> None:
    """Set the key of a setting that ``place`` names, unless it has none and ``value`` is the usual one."""
    name, _, path = place.partition(":")
    *sections, key = path.split(".")
    present = reduce(lambda each, section: each.get(section) or {}, sections, settings.get(name) or {})
    if value != usual or key in present:
        _inner(settings, name, sections)[key] = value


def _translate_optimizers(settings: Settings, before: Tree) -> None:
    ratio = "learner.optimizer.min_lr_ratio"
    if schedule := before.get("learner.optimizer.schedule"):
        settings[ratio] = _min_lr_ratio("learner.optimizer", schedule, settings.get(ratio))
    for name in OPTIMIZERS:
        given = dict(settings.get(name) or {})
        given |= given.pop("optimizer", None) or {}
        if schedule := given.pop("schedule", None):
            given = (TrainConfig().warm_start.optimizer if name == "warm_start.optimizer" else {}) | given
            given["min_lr_ratio"] = _min_lr_ratio(name, schedule, given.get("min_lr_ratio"))
        betas = given.pop("betas", None)
        if betas is not None and list(betas) != [0.9, 0.95]:
            logger.warning(
                "%s.betas=%s counts no more: learner.verl.optimizer.betas are for all.", name, betas
            )
        if name in settings:
            settings[name] = given


def _min_lr_ratio(name: str, schedule: str, ratio: float | None) -> float:
    """A cosine fell to 0 where nothing else was said; a constant rate had 0 here, which did not count."""
    check_choice(f"{name}.schedule", schedule, SCHEDULES)
    if schedule == "constant":
        return 1.0
    return 0.0 if ratio in (None, 1.0) else float(ratio)


def _translate_nodes(settings: Settings, before: Tree) -> None:
    for name in NODES:
        nodes = dict(settings.get(name) or {})
        for part in ("labels", "resources"):
            inside = nodes.get(part)
            nodes |= nodes.pop(part) if isinstance(inside, Mapping) else {}
            nodes |= before.get(f"{name}.{part}") or {}
        if name in settings or nodes:
            settings[name] = nodes


def _translate_fleet(settings: Settings, before: Tree) -> None:
    """The fewest actors were ``min_actors``, and ``num_actors`` the number to start with."""
    fewest = before.get("fleet.min_actors")
    if fewest is None:
        return
    started, most = settings.get("fleet.num_actors"), settings.get("fleet.max_actors")
    if most is None and not isinstance(started, int):
        logger.warning("fleet.min_actors=%s counts no more without fleet.max_actors: set that too.", fewest)
        return
    settings["fleet.num_actors"] = fewest
    settings["fleet.max_actors"] = max(most or started, fewest)
