"""Makes a ``SandboxResult`` of the traces that a program left behind in ``child.run``."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from environments.sandbox.base import Ending, SandboxLimits, SandboxResult, clip


def make_result(
    output: tuple[bytes, bytes, bytes],
    end: dict[str, Any] | None,
    limits: SandboxLimits,
    isolated: bool | None,
    seconds: float,
) -> SandboxResult:
    """Return the result of a program.

    Args:
        output: Its stdout, its stderr, and the report of ``child.run``, each cut to the limits.
        end: ``{"status": wait status, "cpu_seconds": float}``, and ``"out_of_memory": True`` where its
            processes together had too much; None for a program that had to be stopped.
    """
    stdout, stderr, report = output
    reported = _read_report(report)
    ending, exit_code = _ending(end, "error" in reported or bool(end and end.get("out_of_memory")), limits)
    value = reported.get("value")
    return SandboxResult(
        stdout=stdout.decode("utf-8", "replace"),
        stderr=stderr.decode("utf-8", "replace"),
        value=None if value is None else clip(value, limits.output_bytes),
        ending=ending,
        exit_code=exit_code,
        isolated=isolated,
        seconds=seconds,
    )


def _read_report(report: bytes) -> dict[str, str]:
    """The report of ``child.run``. The program can write to it too, so it may hold anything."""
    try:
        line = json.loads(report)
    except (ValueError, RecursionError):
        return {}
    valid = isinstance(line, dict) and all(isinstance(text, str) for text in line.values())
    return line if valid else {}


def _ending(
    end: dict[str, Any] | None, out_of_memory: bool, limits: SandboxLimits
) -> tuple[Ending, int | None]:
    if end is None:
        return Ending.TIMED_OUT, None
    exit_code = os.waitstatus_to_exitcode(end["status"])
    if exit_code == -signal.SIGXCPU or (exit_code < 0 and end["cpu_seconds"] >= 0.9 * limits.cpu_seconds):
        return Ending.TIMED_OUT, None
    if out_of_memory:
        return Ending.OUT_OF_MEMORY, exit_code
    return (Ending.KILLED if exit_code < 0 else Ending.EXITED), exit_code
