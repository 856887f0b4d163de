"""A shell whose files and working directory go on from one command to the next, in any sandbox."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from environments.sandbox import shell_command
from environments.sandbox.base import Ending, Sandbox, SandboxLimits, clip

SHELL_LIMITS = SandboxLimits(file_bytes=64 << 20, open_files=256, output_bytes=16 << 20, memory_bytes=2 << 30)
"""Limits of a command; its time is an argument of its own."""
_PACKING_SECONDS = 30.0
_SHOWN_CHARACTERS = 8 << 10
_SOURCE = Path(shell_command.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class CommandResult:
    """The end of a command: the output, clipped, and the exit code.

    ``exit_code`` is None for one that had to be ended. ``fault`` says why nothing of it was kept.
    """

    output: str
    exit_code: int | None
    fault: str | None = None


@dataclass
class Shell:
    """Runs commands by bash, each in a fresh sandbox, to which it brings what the one before has left.

    So a command cannot reach anything but its folders, nothing that it has started outlives it, and any
    sandbox will do: one of this machine needs ``folders`` for all ``trees``. A command that leaves more than
    15 MiB, packed, or ends the program that runs it, has changed nothing.

    Args:
        trees: The files, by the folder in which they lie; made by ``shell_command.pack``.
        cwd: The folder in which the next command begins; a ``cd`` lasts.
        variables: Environment variables; ``$PATH`` in one stands for the sandbox's own.
    """

    sandbox: Sandbox
    trees: dict[str, str]
    cwd: str
    variables: dict[str, str] = field(default_factory=dict)
    limits: SandboxLimits = SHELL_LIMITS

    def run(self, command: str, seconds: float, kept: Sequence[str] | None = None) -> CommandResult:
        """Run a command for at most ``seconds``; of the folders, ``kept`` have what it has changed.

        Raises:
            EnvironmentFailure: the sandbox itself failed.
        """
        folders = list(self.trees if kept is None else kept)
        request = {
            "trees": self.trees,
            "kept": folders,
            "variables": self.variables,
            "cwd": self.cwd,
            "command": command,
            "seconds": seconds,
        }
        allowed = seconds + _PACKING_SECONDS
        limits = replace(self.limits, timeout_seconds=allowed, cpu_seconds=math.ceil(allowed))
        result = self.sandbox.run(_SOURCE, json.dumps(request), limits)
        output = clip(result.stdout, _SHOWN_CHARACTERS)
        match _read(result.value):
            case {"trees": dict(trees), "cwd": str(cwd), "exit_code": int() | None as exit_code}:
                if {folder: type(tree) for folder, tree in trees.items()} == dict.fromkeys(folders, str):
                    self.trees |= trees
                    self.cwd = cwd
                    return CommandResult(output, exit_code)
        last_line = result.stderr.strip().rpartition("\n")[2]
        ended = "" if result.ending is Ending.EXITED else f"it was {result.ending}"
        return CommandResult(output, None, clip(ended or last_line or "it has ended its own shell", 500))


def _read(answer: str | None) -> object:
    """The answer of ``shell_command``, in whose place a command can put anything."""
    try:
        return json.loads(answer or "null")
    except (ValueError, RecursionError):
        return None
