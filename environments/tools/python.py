"""A Python interpreter that a model can call."""

from __future__ import annotations

import signal

from environments.sandbox.base import Ending, SandboxLimits, SandboxResult, SandboxSource, make_sandbox
from environments.tools.base import Tool, ToolOutput

MODEL_LIMITS = SandboxLimits(output_bytes=8 << 10)
"""The sandbox's limits, but with no more output than a model's context bears."""


class PythonTool(Tool):
    """Runs code in a sandbox; shows stdout, the value of the last expression, and the error.

    The output's metadata hold the ``ending`` and the ``exit_code``; see ``SandboxResult``. For a sandbox that
    the ``description`` does not fit, such as one with a network, pass another.
    """

    name = "python"
    description = (
        "Runs Python code and returns what it prints, the value of its last expression, and any error. "
        "Each call starts a fresh interpreter: nothing is kept from earlier calls. There is no network."
    )

    def __init__(
        self,
        name: str | None = None,
        limits: SandboxLimits = MODEL_LIMITS,
        sandbox: SandboxSource = "local",
        description: str | None = None,
    ) -> None:
        super().__init__(name, description)
        self.limits = limits
        self.sandbox = make_sandbox(sandbox)

    def forward(self, code: str) -> ToolOutput:
        if not isinstance(code, str):
            return ToolOutput(self.name, error=f"the code has to be text, not {code!r}.")
        result = self.sandbox.run(code, limits=self.limits)
        parts = (result.stdout, result.value, result.stderr, _trouble(result, self.limits))
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        metadata = {"ending": result.ending.value, "exit_code": result.exit_code}
        return ToolOutput(self.name, output=text or "(no output)", metadata=metadata)


def _trouble(result: SandboxResult, limits: SandboxLimits) -> str:
    """A sentence about an end that the program's own output cannot show."""
    match result.ending:
        case Ending.TIMED_OUT:
            return f"The code was stopped: it ran longer than the limit of {limits.timeout_seconds:g} s."
        case Ending.OUT_OF_MEMORY:
            return f"The code used more than the limit of {limits.memory_bytes >> 20} MiB of memory."
        case Ending.KILLED:
            return f"The code crashed: {signal.strsignal(-(result.exit_code or 0)) or 'unknown signal'}."
    return f"The code exited with {result.exit_code}." if result.exit_code and not result.stderr else ""
