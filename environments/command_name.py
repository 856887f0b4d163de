"""The commands of Troupe: as a person can type them here, their arguments, and how they end."""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from environments.errors import TroupeError

Main = Callable[[list[str]], int]
"""Function of a command: takes the arguments of the command line, and returns the exit status."""


def command_name(name: str) -> str:
    """``troupe view`` where the shell finds that program, else ``.venv/bin/python -m launch.view``.

    Args:
        name: of the command, such as "view".
    """
    if shutil.which("troupe"):
        return f"troupe {name}"
    python, here = Path(sys.executable), Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else 'python'} -m launch.{name}"


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of the arguments of a command, whose help shows its description as it is.

    Args:
        name: of the command, such as "view", or of a module that can be run.
    """
    program = f"python -m {name}" if "." in name else command_name(name)
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program, description=description, formatter_class=layout)


def positive(text: str) -> float:
    """The value of an argument that is a number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return number


def only_folder(arguments: list[str], module: str, description: str | None) -> Path:
    """The folder that a module's command is given, which has no other argument; ``--help`` describes it."""
    parser = command_parser(module, description)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    return Path(parser.parse_args(arguments).folder)


def explained(*others: type[Exception]) -> Callable[[Main], Main]:
    """A command's ``main`` that prints the reason of a failure, and returns an exit status for it.

    The status is 2 for a ``TroupeError``, or one of ``others``, and 130 for Ctrl-C.
    """

    reasons: tuple[type[Exception], ...] = (TroupeError, *others)

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def run(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except reasons as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                return 2
            except KeyboardInterrupt:
                return 130

        return run

    return decorate
