"""Environments of other libraries, played through ``BaseEnv``: one file per library.

A library is imported when its first environment is made, so that a process pays only for those that it plays.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from environments.bounds import near_name
from environments.errors import ConfigError


def foreign(module: str, package: str) -> Any:
    """Import ``module``, or raise a ConfigError that says which ``package`` has to be installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # the library is there, something that it imports is not
        raise ConfigError(
            f"{package} is not installed on this machine: pip install {package} (it belongs to the extra "
            "'worlds' of Troupe)."
        ) from error


def unknown(kind: str, name: str, known: Collection[str], more: str = "") -> ConfigError:
    """The error for a ``name`` that a library does not know, with the one most like it, and ``more``."""
    return ConfigError(f"There is no {kind} {name!r}.{near_name(name, known)}{more}")
