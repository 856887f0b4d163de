"""Reads settings: from a command line, a program of the user's, or a file, into a ``TrainConfig``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.bounds import leaves
from environments.errors import ConfigError
from launch.settings.address import masked
from launch.settings.tree import TrainConfig, mismatch_of_dtypes, rollouts_of_an_update
from launch.settings.unknown import unknown

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

RECIPE = "recipe"
SUPERVISED = "sft"
"""The recipe of a run that has conversations to imitate, and no tasks."""


@cache
def register() -> None:
    """Make the tree known to Hydra as ``train_config``, for ``compose`` and for users' ``@hydra.main``."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf

    for default in (rollouts_of_an_update, mismatch_of_dtypes):
        OmegaConf.register_new_resolver(default.__name__, default)
    tree = OmegaConf.structured(TrainConfig)
    for name in field_names():
        node = OmegaConf.select(tree, name, throw_on_resolution_failure=False)
        if isinstance(node, DictConfig):
            OmegaConf.set_struct(node, False)  # its keys are the user's: no plus sign needed
    ConfigStore.instance().store(name="train_config", node=tree)


RIGHT_TYPES = {
    "converted to Integer": "a whole number",
    "converted to Float": "a number, such as 0.5 or 1e-4",
    "not a valid bool": "true or false",
    "is not a ListConfig": "a list, such as [a,b]",
    "to Dict[": "a map of names and values, such as {CPU: 1}",
    "is not Optional": "something else than null",
    "Union[bool, str]": "true, false or a text",
}
"""Sorts of values, by the part of OmegaConf's message that shows that a setting needs one."""


def compose(overrides: list[str]) -> TrainConfig:
    """The configuration of ``overrides`` such as ``recipe=calculator learner.optimizer.lr=1e-4``.

    Raises:
        ConfigError: an unknown key or recipe, or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    named = {override.key_or_group for override in _parsed(overrides)}
    if "demonstrations" in named and not named & {RECIPE, "workload", "dataset"}:
        overrides = [f"{RECIPE}={SUPERVISED}", *overrides]
    try:
        with initialize_config_module("launch.recipes", version_base=None):
            tree = hydra_compose("train", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_readable(error)) from error
    return as_train_config(tree)


def as_train_config(given: Any) -> TrainConfig:
    """The dataclasses of a Hydra/OmegaConf tree, or of a ``TrainConfig`` that was made in Python.

    A dict, with or without dotted keys, and a list such as ``["recipe=calculator", "run.num_steps=3"]`` do as
    well; ``None`` stands for the defaults.

    Raises:
        ConfigError: a key that ``TrainConfig`` does not have, or a value of the wrong type.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return compose([str(each) for each in given])
    return with_overrides(given, ())


def with_overrides(given: Any, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of a run's settings file, or of a tree, with ``overrides``.

    Raises:
        ConfigError: an override cannot be read, or names no setting; the file is of something else.
    """
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    settings = dict(_settings(_as_mapping(given), field_names()))
    for override in _parsed(overrides):
        settings |= _settings({override.key_or_group: override.value()}, field_names())
    register()
    setup_globals()  # for ${now:...}: a program that makes a TrainConfig has not started Hydra
    tree = OmegaConf.structured(TrainConfig)
    try:
        for name, value in settings.items():
            OmegaConf.update(tree, name, value)
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(_readable(error)) from error
    assert isinstance(config, TrainConfig)
    return config


def _as_mapping(given: Any) -> Mapping[Any, Any]:
    from omegaconf import DictConfig, OmegaConf

    if isinstance(given, TrainConfig):
        return asdict(given)  # its values may have any type, and its run.directory has no time yet
    if isinstance(given, DictConfig):
        given = OmegaConf.to_container(given)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"config={given!r} has no settings: use a TrainConfig, a dict such as {{'run.num_steps': 3}}, a "
            "list such as ['run.num_steps=3'], or what @hydra.main hands over."
        )
    return given or {}


def _settings(tree: Mapping[Any, Any], known: list[str], section: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in ``tree`` by their dotted names. Raises ``ConfigError`` for one that is not ``known``.

    Hydra lets a ``+`` add anything to a tree, and merging it with dataclasses does not take that away.
    """
    for key, value in tree.items():
        name = f"{section}{key}"
        if isinstance(value, Mapping) and value and name not in known:
            yield from _settings(value, known, f"{name}.")
        elif any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in known):
            yield name, value
        else:
            raise ConfigError(unknown("setting", name, sorted(known)))


def _readable(error: Exception) -> str:
    """Hydra's message in one paragraph, with the nearest existing name, and without a password."""
    text = _named_well(error)
    return masked(text) if "://" in text or "run." in text else text


def _named_well(error: Exception) -> str:
    text = " ".join(str(error).split())
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
    text = f"{text} {cause}".strip()
    if recipe := re.search(r"Could not find 'recipe/([^']*)'", text):
        return f"{unknown('recipe', recipe[1], recipe_names())} Or name a module: workload=my_module."
    section = re.search(r"override '?\+?([\w.]+)", text)
    if "Cannot convert 'dict'" in text and section:  # a part of a setting that has none
        return unknown("setting", section[1], field_names())
    names = re.findall(r"(?:override '?|full_key: )([\w.]+)", text)  # one of the two may be the section alone
    if "not in" in text and names:
        return unknown("setting", max(names, key=len), field_names())
    for sign, right in RIGHT_TYPES.items():
        if sign in text and names:
            name = max(names, key=len)
            given = re.search(
                r"(?:override [^=]*=|Value )(.*?) (?:Value|Invalid|Cannot|field|of type|is not)", text
            )
            return f"{name}{f'={given[1]}' if given else ''} has to be {right}."
    return text


def recipe_names() -> list[str]:
    """The recipes that come with Troupe."""
    return sorted(each.stem for each in Path(__file__).parents[1].glob("recipes/recipe/*.yaml"))


def field_names() -> list[str]:
    """All settings by their dotted names."""
    return [leaf.name for leaf in leaves(TrainConfig())]


# -- the settings that a command line names ------------------------------------------------------------


def named_settings(overrides: Sequence[str]) -> list[str]:
    """The settings that ``overrides`` name: rollout.group_size for ``rollout={group_size: 4}``, too.

    Raises:
        ConfigError: an override cannot be read, deletes a setting, or gives a section the value of a setting.
    """
    names = []
    for override in _parsed(overrides):
        names += _leaf_names(override.key_or_group, override.value())
    return names


def _parsed(overrides: Sequence[str]) -> Iterator[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = " ".join(str(error).split())
            raise ConfigError(masked(f"{text!r} cannot be read: write setting=value. ({reason})")) from error
        _check(override)
        yield override


def _check(override: Override) -> None:
    """Raise ``ConfigError`` for what Hydra takes in silence, or rejects without its name."""
    name, value, names = override.key_or_group, override.value(), field_names()
    if not name:
        raise ConfigError(f"{override.input_line} names no setting: write setting=value.")
    inside = [each for each in names if each.startswith(f"{name}.")]
    if override.is_delete() and (inside or name in names):
        raise ConfigError(f"{override.input_line} deletes a setting: write {name}=VALUE, or leave it out.")
    if inside and not isinstance(value, dict):
        text = f"{override.input_line}: {name} is a section. Set one in it: {', '.join(inside)}."
        raise ConfigError(masked(text))
    if name == RECIPE and not override.is_delete() and not isinstance(value, str):
        raise ConfigError(f"{override.input_line} names no recipe: write one name, or leave it out.")


def _leaf_names(name: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaf_names(f"{name}.{key}", inner)]
