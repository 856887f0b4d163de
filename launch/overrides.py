"""The arguments of a command, such as ``run.num_steps=3``: the settings that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError
from launch.config import field_names

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

RECIPE = "recipe"


def named_settings(overrides: Sequence[str]) -> list[str]:
    """The settings that ``overrides`` name: rollout.group_size for ``rollout={group_size: 4}``, too.

    Raises:
        ConfigError: an override cannot be read, deletes a setting, or gives a section the value of a setting.
    """
    names = []
    for override in _parsed(overrides):
        _check(override)
        names += _leaf_names(override.key_or_group, override.value())
    return names


def _parsed(overrides: Sequence[str]) -> Iterator[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text in overrides:
        try:
            yield parser.parse_override(text)
        except HydraException as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{text!r} cannot be read: write setting=value. ({reason})") from error


def _check(override: Override) -> None:
    """Raise ``ConfigError`` for what Hydra takes in silence, or rejects without its name."""
    name, value, names = override.key_or_group, override.value(), field_names()
    if not name:
        raise ConfigError(f"{override.input_line} names no setting: write setting=value.")
    inside = [each for each in names if each.startswith(f"{name}.")]
    if override.is_delete() and (inside or name in names):
        raise ConfigError(
            f"{override.input_line} deletes a setting, and every setting has a value: write {name}=VALUE, or "
            "leave it out."
        )
    if inside and not isinstance(value, dict):
        raise ConfigError(f"{override.input_line}: {name} is a section. Set one in it: {', '.join(inside)}.")
    if name == RECIPE and not override.is_delete() and not isinstance(value, str):
        raise ConfigError(f"{override.input_line} names no recipe: write one name, or leave it out.")


def _leaf_names(name: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaf_names(f"{name}.{key}", inner)]
