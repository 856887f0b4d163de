"""A replica's way to the pool of an agent: what ``AgentPool`` offers, without Ray's wrapper around errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from actors.ray_tools.calls import detached_call
from environments.errors import SamplerError
from environments.types import StepEvent, Trajectory
from policies.agent_api.context import ReplayedAnswer, RequestContext, TokenUsage
from policies.sampler import SamplingParams

T = TypeVar("T")


class PoolClient:
    """The pool of one agent, which all replicas reach. It is a ``ResponseStore`` too.

    Its calls last: a task of an A2A client goes on when the client hangs up, and only ``play`` decides that
    an episode ends with its request.
    """

    def __init__(self, pool: ray.actor.ActorHandle) -> None:
        self._pool = pool

    async def play(
        self, message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[StepEvent | Trajectory | ReplayedAnswer | TokenUsage, None]:
        """``AgentPool.play``. Raises as it does."""
        parts = detached_call(self._pool.play.remote, message, params, context)
        try:
            async for part in parts:
                yield await _answer(part)
        finally:
            ray.cancel(parts)  # it has ended, or the client has gone

    async def withdraw(self, owner: str, key: str) -> bool:
        """``AgentPool.withdraw``."""
        return await _call(self._pool.withdraw.remote, owner, key)

    async def is_under_way(self, owner: str, key: str) -> bool:
        """``AgentPool.is_under_way``."""
        return await _call(self._pool.is_under_way.remote, owner, key)

    async def check(self) -> None:
        """Raise ``TroupeError`` if the agent cannot answer a message now."""
        await _call(self._pool.check.remote)

    async def description(self) -> str:
        """What the agent does."""
        return await _call(self._pool.description.remote)

    async def takes_follow_ups(self) -> bool:
        """Whether a conversation can go on."""
        return await _call(self._pool.takes_follow_ups.remote)

    # -- responses, as in ``ResponseStore`` ----------------------------------------------------------

    async def keep(self, owner: str, response: dict[str, Any]) -> None:
        await _call(self._pool.keep.remote, owner, response)

    async def kept(self, owner: str, response_id: str) -> dict[str, Any] | None:
        return await _call(self._pool.kept.remote, owner, response_id)

    async def forget(self, owner: str, response_id: str) -> bool:
        return await _call(self._pool.forget.remote, owner, response_id)

    async def end_session(self, owner: str, session: str) -> None:
        await _call(self._pool.end_session.remote, owner, session)

    # -- tasks of A2A, as in ``AgentPool`` -----------------------------------------------------------

    async def keep_task(self, owner: str, task_id: str, task: bytes) -> None:
        await _call(self._pool.keep_task.remote, owner, task_id, task)

    async def kept_task(self, owner: str, task_id: str) -> bytes | None:
        return await _call(self._pool.kept_task.remote, owner, task_id)

    async def kept_tasks(self, owner: str) -> list[bytes]:
        return await _call(self._pool.kept_tasks.remote, owner)

    async def replace_task(self, owner: str, task_id: str, old: bytes, new: bytes) -> bool:
        return await _call(self._pool.replace_task.remote, owner, task_id, old, new)

    async def forget_task(self, owner: str, task_id: str) -> None:
        await _call(self._pool.forget_task.remote, owner, task_id)


async def _call(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    return await _answer(detached_call(method, *arguments))


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise SamplerError(f"The agents have ended: {error}") from error
