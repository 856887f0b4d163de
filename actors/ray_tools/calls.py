"""Calls of actors: one whose answer has to come soon, one that outlives its caller, one that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.timing import CALL_ANSWER_SECONDS
from environments.command_name import command_name
from environments.errors import SamplerError, TroupeError

WAIT_SECONDS = 60.0
"""A wait inside an actor ends after this time, and the caller calls again."""


def get_or_raise(references: Sequence[ray.ObjectRef], who: str) -> list[Any]:
    """Results of calls that take no time.

    Args:
        who: the actors that were called, for the error.

    Raises:
        TroupeError: one of them does not answer.
        RayActorError: one of them has died.
    """
    try:
        return list(ray.get(list(references), timeout=CALL_ANSWER_SECONDS))
    except GetTimeoutError as error:
        raise _hung(who) from error


async def wait_or_raise(reference: Awaitable[Any], who: str) -> Any:
    """Result of one such call, in an event loop. Raises as ``get_or_raise`` does."""
    try:
        async with asyncio.timeout(CALL_ANSWER_SECONDS):
            return await reference
    except TimeoutError as error:
        raise _hung(who) from error


def _hung(who: str) -> TroupeError:
    return TroupeError(
        f"{who} did not answer for {CALL_ANSWER_SECONDS:g} s: a process hangs or was stopped, or its "
        f"node has too much to do. `{command_name('chaos')}` lists the processes of a node."
    )


@contextmanager
def own_errors(lost: str | None = None) -> Iterator[None]:
    """Raise an actor's error as the actor has raised it, without Ray's wrapper around it.

    Args:
        lost: beginning of the ``SamplerError`` that another error of Ray's becomes, as the actor's death is.
    """
    try:
        yield
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        if lost is None:
            raise
        raise SamplerError(f"{lost}: {error}") from error


def detached_call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call an actor's method for work that goes on when the call that makes it is cancelled.

    When Ray cancels a call (Ray Serve does so when a client hangs up), it also cancels the calls that were
    made in it, by a note in the context variables; those of background tasks too, which inherit the note.

    Args:
        method: such as ``actor.method.remote``.
        arguments: of the method.
    """
    return Context().run(method, *arguments)


async def wait_with_timeout(
    changed: asyncio.Condition, is_met: Callable[[], bool], seconds: float | None = None
) -> None:
    """Return when ``is_met`` holds, or after ``seconds``, by default a minute; the caller calls again then.

    The wait has an end because Ray ends no call whose caller has died: replicas come and go, and an actor has
    places for so many calls.

    Args:
        changed: notified when ``is_met`` may have changed.
    """
    async with changed:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS if seconds is None else seconds):
                await changed.wait_for(is_met)
