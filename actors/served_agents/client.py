"""A replica's way to the pool of an agent: what ``AgentPool`` offers, without Ray's wrapper around errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from functools import partial
from typing import Any, TypeVar

import ray

from actors.ray_tools.calls import detached_call, own_errors
from actors.served_agents.idempotency import Part
from policies.agent_api.context import AgentProfile, ReplayedAnswer, RequestContext
from policies.agent_api.responses import ResponseStore
from policies.sampler import SamplingParams

T = TypeVar("T")


class PoolClient:
    """The pool of one agent, which all replicas reach.

    Its calls last: a task of an A2A client goes on when the client hangs up, and only ``play`` decides that
    an episode ends with its request.
    """

    def __init__(self, pool: ray.actor.ActorHandle) -> None:
        self._pool = pool
        self.responses: ResponseStore = self._part("responses")
        self.messages = self._part("messages")
        """``served_agents.messages.Messages``, whose methods are asynchronous here."""
        self.tasks = self._part("tasks")
        """Tasks of A2A: a ``PerKeyLRU`` of bytes, whose methods are asynchronous here."""

    async def play(
        self, message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[Part | ReplayedAnswer, None]:
        """``AgentPool.play``. Raises as it does."""
        parts = detached_call(self._pool.play.remote, message, params, context)
        try:
            async for part in parts:
                yield await _answer(part)
        finally:
            ray.cancel(parts)  # it has ended, or the client has gone

    async def check(self) -> None:
        """Raise ``TroupeError`` if the agent cannot answer a message now."""
        await _answer(detached_call(self._pool.check.remote))

    async def profile(self) -> AgentProfile:
        """Return what clients may know of the agent."""
        return await _answer(detached_call(self._pool.profile.remote))

    def _part(self, name: str) -> Any:
        return _Part(self._pool, name)


class _Part:
    """A part of a pool. Each of its methods is called by its own name: see ``AgentPool.call``."""

    def __init__(self, pool: ray.actor.ActorHandle, name: str) -> None:
        self._pool, self._name = pool, name

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await _answer(detached_call(self._pool.call.remote, self._name, method, *arguments))


async def _answer(call: Awaitable[T]) -> T:
    with own_errors("The agents have ended"):
        return await call
