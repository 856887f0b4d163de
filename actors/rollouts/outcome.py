"""What the fleet gets of a rollout, also where the actor that plays it dies, hangs or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.ray_tools.node_watch import SILENT_SECONDS, NodeWatch
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, failed
from actors.rollouts.rollout_actor import CLOSE_SECONDS, GRACE_SECONDS, RolloutResult
from environments.types import TerminationReason

IDLE_SECONDS = 30.0
"""An idle actor that does not answer for so long is lost."""


async def started(actor: ray.actor.ActorHandle, node_watch: NodeWatch) -> str | None:
    """The node of an actor that has started; ``None`` where a silent node is back before.

    The actor was kept away from that node, and the cluster may have no room elsewhere.
    """
    ready: asyncio.Future[str] = asyncio.ensure_future(actor.ready.remote())
    waits_for: list[asyncio.Future[Any]] = [ready]
    if node_watch.elsewhere():
        waits_for.append(node_watch.next_return())
    try:
        await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
        return await ready if ready.done() else None
    finally:
        ready.cancel()


async def is_there(actor: ray.actor.ActorHandle, node: str, node_watch: NodeWatch) -> bool:
    """Whether an actor that was idle answers. If not, whatever it was to play has not begun.

    Without asking, a request would be tried, and could fail for good, on actors that died while they waited.
    """
    silence = node_watch.silence(node)
    answer: asyncio.Future[Any] = asyncio.ensure_future(actor.ready.remote())
    await asyncio.wait({answer, silence}, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if not answer.done():
        answer.cancel()
        return False
    return not silence.done() and answer.exception() is None


async def outcome(
    run: Awaitable[RolloutResult],
    request: RolloutRequest,
    limits: RolloutLimits,
    node: str,
    node_watch: NodeWatch,
) -> RolloutResult:
    """The result of ``RolloutActor.run``, or a failed trajectory where the actor cannot give one.

    Args:
        run: the call.
        node: where the actor is.
        node_watch: knows whether the node still answers.
    """
    silence = node_watch.silence(node)
    seconds = limits.timeout_seconds + CLOSE_SECONDS + GRACE_SECONDS
    running: asyncio.Future[Any] = asyncio.ensure_future(run)
    try:
        await asyncio.wait({running, silence}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return await running
        if silence.done():
            text = f"The rollout actor's node {node} has not answered for {SILENT_SECONDS} s."
            return RolloutResult(failed(request, TerminationReason.CRASHED, text), usable=False)
        text = (  # it could not even be interrupted
            f"The rollout ran longer than its limit of {limits.timeout_seconds:g} s. Nothing could "
            "interrupt it, so its process was ended, and its environment not closed."
        )
        return RolloutResult(failed(request, TerminationReason.TIMEOUT, text), usable=False)
    except RayActorError as error:
        text = f"The rollout actor died: {error}"
        return RolloutResult(failed(request, TerminationReason.CRASHED, text), usable=False)
    except RayTaskError as error:  # mostly: what it returned cannot be sent
        text = f"The rollout could not be returned: {error}"
        return RolloutResult(failed(request, TerminationReason.ENV_ERROR, text), usable=False)
    except RayError as error:  # lost with its node, or it cannot be read in this process
        text = f"The rollout's result was lost: {error}"
        return RolloutResult(failed(request, TerminationReason.CRASHED, text), usable=False)
    finally:
        running.cancel()  # what comes from it now counts no more
