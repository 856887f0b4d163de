"""A wait in an actor for what another process asks for: it has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

WAIT_SECONDS = 60.0


async def wait_a_while(changed: asyncio.Condition, is_met: Callable[[], bool]) -> None:
    """Return when ``is_met`` holds, or after a minute; the caller asks again then.

    The wait has an end because Ray ends no call whose caller has died: replicas come and go, and an actor has
    places for so many calls.

    Args:
        changed: notified when ``is_met`` may have changed.
    """
    async with changed:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                await changed.wait_for(is_met)
