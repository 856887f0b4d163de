"""Options: settings that one estimator or loss has for itself, set by ``algorithm.options.<name>``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from environments.bounds import Leaf, check_choice, leaves
from environments.errors import ConfigError


@dataclass
class NoOptions:
    """Of an estimator or a loss that has none."""


def resolve_options(
    name: str, given: Mapping[str, Any], fixed: Mapping[str, Any], *declared: type
) -> dict[str, Any]:
    """The values of all options that the dataclasses ``declared`` have as fields.

    An option that two of them declare has one value for both.

    Args:
        name: the algorithm's.
        given: what the user has set.
        fixed: what is part of the algorithm's definition.

    Raises:
        ConfigError: an unknown option, one that cannot be set, or a value of the wrong type or out of bounds.
    """
    known = {leaf.name: leaf for each in declared for leaf in leaves(each())}
    for option, value in given.items():
        setting = f"algorithm.options.{option}"
        if not known:
            raise ConfigError(f"{setting}={value!r}: algorithm.name={name!r} has no options. Leave it out.")
        check_choice("algorithm.options", option, known, f" These are the options of {name}.")
        if option in fixed:
            raise ConfigError(
                f"{setting}={value!r} has no effect in algorithm.name={name!r}: it is {fixed[option]!r} by "
                "definition. Leave it out."
            )
        _check_type(setting, value, known[option])
        known[option].bound.check_value(setting, value)
    return {option: leaf.value for option, leaf in known.items()} | dict(fixed) | dict(given)


def _check_type(setting: str, value: Any, leaf: Leaf) -> None:
    wanted = type(leaf.value)
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise ConfigError(
            f"{setting}={value!r} has to be of type {wanted.__name__}; its default is {leaf.value!r}."
        )
