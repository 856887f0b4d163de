"""Where agents, environments and the policy run: every Ray actor of the project.

Importing this is light, because every rollout actor does so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.engine import AgentExecutionEngine

__all__ = ["AgentExecutionEngine"]


def __getattr__(name: str) -> Any:
    if name == "AgentExecutionEngine":
        from actors.engine import AgentExecutionEngine

        return AgentExecutionEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
