"""What all commands share: ``--help``, overrides, and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from environments.errors import TroupeError
from launch.config import TrainConfig, compose
from launch.help import help_text


def run_command(
    name: str, summary: str | None, arguments: list[str], work: Callable[[TrainConfig], None]
) -> int:
    """Do ``work`` with the configuration of ``arguments``.

    Returns:
        The exit status: 0 done, 2 invalid settings or a failure whose reason was printed, 130 interrupted.
    """
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(help_text(name, summary or ""))
        return 0
    try:
        work(compose(arguments))
    except TroupeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
