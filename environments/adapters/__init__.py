"""Environments of other libraries, played through ``BaseEnv``: one file per library.

A library is imported when its first environment is made, so that a process pays only for those that it plays.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

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


def unknown(kind: str, name: object, known: Iterable[str], more: str = "") -> ConfigError:
    """The error for a ``name`` that a library does not know, with those that look like it, and ``more``."""
    near = get_close_matches(str(name), list(known), n=3)
    guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ConfigError(f"There is no {kind} {name!r}.{guess}{more}")
