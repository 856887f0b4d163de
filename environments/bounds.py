"""Bounds of settings, declared beside the fields of their dataclasses, and the check of a tree of them.

All layers declare their settings with ``setting``; ``check_bounds`` finds a value outside its bound and names
it as the command line does: ``learner.optimizer.lr=-1.0 has to be at least 0.``
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from environments.errors import ConfigError

T = TypeVar("T")

KEY = "bound"
"""Name of a bound in the metadata of its field."""
_LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
"""Comparisons of a value with the limits of a bound, by their names."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The values that a setting, or every item of its list, may have. ``None`` (not set) always passes."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    """``at_least`` and ``at_most`` are values that it may have, ``above`` and ``below`` are not."""
    one_of: Collection[str] = ()
    length: int | None = None
    """Items of a list."""

    def __str__(self) -> str:
        """Words for a message: ``at least 0 and below 1``, ``cpu or cuda``."""
        if self.one_of:
            *others, last = self.one_of
            return f"{', '.join(others)} or {last}" if others else last
        return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in self._limits().items())

    def check_value(self, name: str, value: Any) -> None:
        """Raise ``ConfigError`` for a value outside, and for a number that is not finite."""
        if isinstance(value, list):
            if self.length is not None and len(value) != self.length:
                raise ConfigError(f"{name}={value} has to be a list of {self.length}.")
            for index, item in enumerate(value):
                self.check_value(f"{name}[{index}]", item)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value} has to be a finite number.")
        elif self.one_of:
            check_choice(name, value, self.one_of)
        elif value is not None and self._limits():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}={value!r} has to be a number {self}.")
            if not all(_LIMITS[name](value, limit) for name, limit in self._limits().items()):
                raise ConfigError(f"{name}={value} has to be {self}.")

    def _limits(self) -> dict[str, float]:
        limits = {name: getattr(self, name) for name in _LIMITS}
        return {name: limit for name, limit in limits.items() if limit is not None}


def setting(default: T, **bound: Any) -> T:
    """A dataclass field with a bound: ``num_steps: int = setting(100, at_least=1)``.

    Args:
        default: the field's default; a list is copied for each instance.
        bound: the fields of ``Bound``.
    """
    metadata = {KEY: Bound(**bound)}
    made: Any
    if isinstance(default, list):
        made = field(default_factory=default.copy, metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    return made


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A setting of a tree of dataclasses."""

    name: str
    """Dotted, as on the command line."""
    owner: type
    """The dataclass that declares it."""
    declaration: Field[Any]
    value: Any

    @property
    def bound(self) -> Bound:
        """Return what its value may be: anything, if nothing was declared."""
        bound: Bound = self.declaration.metadata.get(KEY, Bound())
        return bound

    def check(self, name: str, value: Any) -> None:
        """Raise ``ConfigError`` for a ``value`` that is not of the default's type, or out of bounds."""
        wanted = type(self.value)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(
                f"{name}={value!r} has to be of type {wanted.__name__}; its default is {self.value!r}."
            )
        self.bound.check_value(name, value)


def leaves(settings: Any, prefix: str = "") -> Iterator[Leaf]:
    """The settings of a dataclass instance and of the dataclasses in its fields, in the order of the fields.

    Args:
        settings: an instance, such as ``TrainConfig()``.
        prefix: the dotted name of ``settings`` itself, with a dot at its end.
    """
    for declaration in fields(settings):
        name, value = prefix + declaration.name, getattr(settings, declaration.name)
        if is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield Leaf(name=name, owner=type(settings), declaration=declaration, value=value)


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Check all settings of a tree by the bounds beside their fields; arguments as of ``leaves``.

    Raises:
        ConfigError: names the first setting outside its bound, its value and what it has to be.
    """
    for leaf in leaves(settings, prefix):
        leaf.bound.check_value(leaf.name, leaf.value)


def no_argument(owner: str, name: str, known: Collection[str], remedy: str | None = None) -> str:
    """The sentence about an argument ``name`` that ``owner`` does not have, with the nearest that it has.

    Args:
        remedy: stands in the place of the nearest one.
    """
    hint = near_name(name, known) or f" Known: {', '.join(known) or 'none'}."
    return f"{owner} has no argument {name!r}.{f' {remedy}' if remedy else hint}"


def near_name(name: str, known: Collection[str]) -> str:
    """A sentence, after a space, that offers the name most like an unknown one; empty where none is near."""
    swapped = [each for each in known if sorted(each) == sorted(str(name))]  # gpro is grpo more than gspo
    near = swapped or difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: str | None, choices: Collection[str], more: str = "") -> None:
    """Raise ``ConfigError`` for a ``value`` that is not among ``choices``; ``None`` is a value not set.

    Args:
        name: what has the value, for the message.
        more: a sentence for the end of the message.
    """
    if value is not None and value not in choices:
        hint = near_name(value, choices)
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}.{hint}{more}")
