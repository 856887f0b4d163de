"""Modules and classes that a setting names. An error in a user's own code names the line that made it."""

from __future__ import annotations

import functools
import importlib
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from environments.bounds import near_name
from environments.errors import ConfigError, TroupeError

T = TypeVar("T")

_OWN_PACKAGES = {"environments", "policies", "actors", "launch"}


def load_module(setting: str, name: str) -> ModuleType:
    """The module that ``setting`` names.

    Args:
        setting: with its value, for messages, such as "workload='my_workload'".
        name: dotted, as in an import statement.

    Raises:
        ConfigError: there is no such module, or its own code fails.
    """
    if "" in name.split(".") or "/" in name or name.endswith(".py"):
        raise ConfigError(
            f"{setting}: {name!r} is not the name of a module. Write it as in an import statement, such as "
            "my_module for ./my_module.py."
        )
    try:
        return call_own(setting, importlib.import_module, name)
    except ConfigError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise  # the module is there, something that it imports is not
        package = name.partition(".")[0]
        if package in _OWN_PACKAGES:
            raise ConfigError(
                f"{setting}: there is no module {name!r}. {package} is a package of Troupe's, which hides a "
                "folder of that name: rename yours."
            ) from error
        raise ConfigError(
            f"{setting}: there is no module {name!r}. It has to be importable in every process that uses it: "
            "installed, or in the working directory, such as my_module for ./my_module.py."
        ) from error


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
        hint = near_name(name, known) or f" Known: {', '.join(sorted(known))}."
        raise ConfigError(f'{setting}: there is no {name!r}.{hint} Name your own as "module:Class".')
    module = load_module(f"{setting}={name!r}", module_name)
    found = vars(module).get(class_name)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(
            f"{setting}={name!r}: {module_name}.{class_name} has to be a class that is derived from "
            f"{base.__module__}.{base.__qualname__}, and is {found!r}."
        )
    return found


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """The function, or other object that can be called, that a setting names as "module:function".

    Args:
        setting: with its value, for messages, such as "--reward my_rewards:strict".

    Raises:
        ConfigError: there is no such module or function, or the module's code fails.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f'{setting} names no function: write "module:function".')
    found = vars(load_module(setting, module_name)).get(function_name)
    if not callable(found):
        raise ConfigError(f"{setting}: {module_name} has no function {function_name!r}. Define it there.")
    function: Callable[..., Any] = found
    return function


def call_own(setting: str, function: Callable[..., T], *arguments: Any) -> T:
    """Return what ``function`` returns, which runs a user's code.

    Raises:
        ConfigError: that code raised; names ``setting``, the error and the last line of the user's that ran.
        TroupeError: as it was raised, because its message is meant to be read.
    """
    try:
        return function(*arguments)
    except TroupeError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting} failed{_last_line(error)}: {_named(error)}") from error


def _last_line(error: BaseException) -> str:
    """File, number and text of the last line of the user's own that ran, or that Python could not read."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" in {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    lines = traceback.extract_tb(error.__traceback__)[1:]  # the first one is ours
    own = [line for line in lines if _is_users(line.filename)]
    return f" in {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""


def _is_users(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_file() and not any(path.is_relative_to(folder) for folder in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    """Return the folders of Python and the installed packages: code in these folders is not the user's."""
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


def _named(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"
