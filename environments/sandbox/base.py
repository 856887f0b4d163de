"""The sandbox protocol: runs an unchecked Python program, and returns its output and its ending.

Used by the ``python`` tool and by the rewards for code. Which sandbox they use is their argument
``sandbox``: see ``make_sandbox``, and README.md in this folder.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from environments.errors import ConfigError
from environments.named_module import load_class

SANDBOXES = {
    "local": "environments.sandbox.local:LocalSandbox",
    "best-effort": "environments.sandbox.local:BestEffortSandbox",
}
"""The sandboxes that need no arguments, by name; imported when they are asked for."""


@dataclass(frozen=True)
class SandboxLimits:
    """The resources that a program may use.

    CPU time and memory hold for any one process, and in the local sandbox, for all processes together too,
    which are counted every 0.2 s; open files hold for one process. ``file_bytes`` is the size of any file,
    and in the local sandbox, of all files together.
    ``output_bytes`` is how much is kept of stdout, of stderr and of the value: the beginning and the end.
    """

    timeout_seconds: float = 10.0
    cpu_seconds: int = 60
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    open_files: int = 64
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"SandboxLimits.{name}={value} lets no program run: use a number above 0.")


DEFAULT_LIMITS = SandboxLimits()


class Ending(StrEnum):
    """Ways in which a program may end."""

    EXITED = "exited"
    """Ended by itself; ``exit_code`` shows success or failure."""
    TIMED_OUT = "timed_out"
    """Was killed at ``timeout_seconds``, or at ``cpu_seconds``."""
    OUT_OF_MEMORY = "out_of_memory"
    """Asked for more than ``memory_bytes`` and did not catch the MemoryError."""
    KILLED = "killed"
    """Ended by a signal: it crashed, the machine was short of memory, or its files together took too much."""


@dataclass(frozen=True)
class SandboxResult:
    """The result of one program. Its texts, ``value`` included, were written by an untrusted program.

    Args:
        value: The ``repr`` of the last statement, if that is an expression other than None.
        exit_code: Negative for a signal, as in ``subprocess``; None after a time-out.
        isolated: Whether the program was kept from the network, from other processes and from all files but
            the system's; None where the sandbox cannot tell.
        seconds: Wall-clock time of the run, the start of the interpreter included.
    """

    stdout: str
    stderr: str
    value: str | None
    ending: Ending
    exit_code: int | None
    isolated: bool | None
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.ending is Ending.TIMED_OUT

    @property
    def succeeded(self) -> bool:
        return self.ending is Ending.EXITED and self.exit_code == 0


@runtime_checkable
class Sandbox(Protocol):
    """Runs programs, each in a fresh interpreter that keeps nothing of earlier ones.

    A sandbox travels to rollout actors by pickle, and one object is called from several threads at once:
    keep settings in it, not processes or connections. A frozen dataclass does both.
    """

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
        """Run ``source`` as ``__main__`` and return its result, whether it succeeds or fails.

        ``stdin`` is a file to the program, not a pipe: the rewards for code seek in it. The program is a
        Python 3.10 or newer on Linux, and may fork.

        Raises:
            EnvironmentFailure: the sandbox itself failed, which says nothing about the program.
        """
        ...


SandboxSource = str | Sandbox
"""A sandbox, or its name: one of ``SANDBOXES``, or ``"module:Class"`` for a class without arguments."""


def make_sandbox(source: SandboxSource) -> Sandbox:
    """Return the sandbox that ``source`` names or is.

    Raises:
        ConfigError: there is none of that name, or the object has no method ``run``.
    """
    sandbox = _by_name(source) if isinstance(source, str) else source
    if isinstance(sandbox, type) or not isinstance(sandbox, Sandbox):
        raise ConfigError(
            f"sandbox={source!r} is no sandbox: pass an object with a method run(source, stdin, limits), "
            f"one of the names {sorted(SANDBOXES)}, or 'module:Class'."
        )
    return sandbox


@functools.cache
def _by_name(name: str) -> Sandbox:
    found = load_class("sandbox", name, SANDBOXES, Sandbox)
    try:
        return found()
    except TypeError as error:
        raise ConfigError(f"sandbox={name!r} needs arguments ({error}): make and pass the object.") from error


def clip(text: str, length: int) -> str:
    """Return ``text``, or its beginning and end with a note between them if it is longer than ``length``."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[len(text) - half :]}"
