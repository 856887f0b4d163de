"""The report of ``check_environment``: the faults of an environment, in words."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from environments.errors import EnvironmentFailure


@dataclass
class Report:
    """The findings of ``check_environment``; its ``str()`` is for a person to read.

    An error breaks rollouts or falsifies rewards; a warning is about code that works, but may surprise.
    """

    environment: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether there is no error."""
        return not self.errors

    def raise_if_faulty(self) -> None:
        """Raise an EnvironmentFailure with the report as its message, if there is an error."""
        if not self.ok:
            raise EnvironmentFailure(str(self))

    def error(self, *texts: str) -> None:
        """Add errors, each once."""
        self.errors += [text for text in texts if text not in self.errors]

    def warn(self, *texts: str) -> None:
        """Add warnings, each once."""
        self.warnings += [text for text in texts if text not in self.warnings]

    def __str__(self) -> str:
        if not self.errors and not self.warnings:
            return f"{self.environment}: all fine."
        found = [f"error: {text}" for text in self.errors] + [f"warning: {text}" for text in self.warnings]
        return "\n".join([f"{self.environment}:", *(textwrap.indent(text, "  ") for text in found)])
