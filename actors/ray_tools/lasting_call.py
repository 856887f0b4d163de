"""Calls of actors that do not end with the call in which they are made."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any


def lasting_call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call an actor's method, for work that goes on when the call that we are in is cancelled.

    When Ray cancels a call (Ray Serve does so when a client hangs up), it also cancels the calls that were
    made in it, by a note in the context variables; those of background tasks too, which inherit the note.

    Args:
        method: such as ``actor.method.remote``.
        arguments: of the method.
    """
    return Context().run(method, *arguments)
