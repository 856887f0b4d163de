"""The commands of Troupe as a person can type them here: for messages that say what to run next."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def command_name(name: str) -> str:
    """``troupe view`` where the shell finds that program, else ``.venv/bin/python -m launch.view``.

    Args:
        name: of the command, such as "view".
    """
    if shutil.which("troupe"):
        return f"troupe {name}"
    python, here = Path(sys.executable), Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else 'python'} -m launch.{name}"
