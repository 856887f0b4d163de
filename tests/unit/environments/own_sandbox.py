"""A sandbox that a user has written: it runs programs as the local one does, and marks what they print."""

from __future__ import annotations

from dataclasses import dataclass, replace

from environments.sandbox.base import DEFAULT_LIMITS, SandboxLimits, SandboxResult
from environments.sandbox.local import LocalSandbox


@dataclass(frozen=True)
class OwnSandbox:
    """Replaces "secret" by ``mark`` in the output, and lets programs know ``mark``."""

    mark: str = "own"

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
        result = LocalSandbox().run(f"mark = {self.mark!r}\n{source}", stdin, limits)
        return replace(result, stdout=result.stdout.replace("secret", self.mark))


class WithoutRun:
    pass


class WithArguments:
    def __init__(self, image: str) -> None:
        self.image = image

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
        raise NotImplementedError
