"""Classes that a setting names: one of Troupe's own by a short name, a user's own as "module:Class"."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from environments.errors import ConfigError
from environments.named_module import load_module

T = TypeVar("T")


def load_class(setting: str, name: str, known: Mapping[str, str], base: type[T]) -> type[T]:
    """The class that ``setting`` names.

    Args:
        setting: for messages, such as "server.engine.name".
        name: a key of ``known``, or "module:Class" of a module that this process can import.
        known: Troupe's own classes, as "module:Class" by their short names.
        base: the class or protocol that it has to be derived from.

    Raises:
        ConfigError: there is no such name, module or class, the module's code fails, or the class is not
            derived from ``base``.
    """
    path = known.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(known))}."
        raise ConfigError(f'{setting}: there is no {name!r}. {hint} Name your own as "module:Class".')
    module = load_module(f"{setting}={name!r}", module_name)
    found = vars(module).get(class_name)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(
            f"{setting}={name!r}: {module_name}.{class_name} has to be a class that is derived from "
            f"{base.__module__}.{base.__qualname__}, and is {found!r}."
        )
    return found
