"""The actor between the rollout actors of a node and a server: it renders, queues and decodes for them.

Rollout actors stay light because everything that needs a tokenizer lives here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from actors.sampling.request_queue import Assignment, ReplicaReport
from actors.settings import MANY_CALLS
from environments.errors import SamplerError
from environments.types import Completion
from policies.sampler import QueueStatus, Sampler, SampleRequest, TokenOutput, TokenRequest, check_logprobs


@dataclass(eq=False, slots=True)
class _WaitingSample:
    """Call of ``sample`` that waits."""

    session_id: str
    since: float
    answer: asyncio.Future[Completion]
    is_cancelled: bool = False


# A request is a call that waits. The limit must never keep a replica's call out.
@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=MANY_CALLS)
class SamplerActor:
    """Hosts one sampler for all rollout actors of a fleet on a node.

    Args:
        make_sampler: called in the actor's process, so that only this process imports what it needs.
    """

    def __init__(self, make_sampler: Callable[[], Sampler]) -> None:
        self._make_sampler = make_sampler
        self._sampler = make_sampler()
        self._open: set[_WaitingSample] = set()

    async def recipe(self) -> Callable[[], Sampler] | None:
        """Return ``make_sampler``, for the actors of other nodes; ``None`` where they are to use this one."""
        return self._make_sampler if self._sampler.lives_on_each_node else None

    async def open(self) -> None:
        """Connect. Raises ``SamplerError`` if there is nothing to sample."""
        await self._sampler.open()

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion.

        Raises:
            SamplerError: ``cancel`` was called, or the server has failed.
            As ``Sampler.sample`` does, and ``LogprobError``.
        """
        await self._sampler.open()  # where Ray has started this actor anew, nothing else does
        answer = asyncio.ensure_future(self._sampler.sample(request))
        call = _WaitingSample(request.session_id, time.monotonic(), answer)
        self._open.add(call)
        try:
            completion = await call.answer
        except asyncio.CancelledError:
            if not call.is_cancelled:  # then Ray has cancelled this method
                raise
            raise SamplerError("The rollout was cancelled.") from None
        finally:
            self._open.discard(call)
        check_logprobs(completion.logprobs, self._sampler.source)
        return completion

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out. Raises as ``sample`` does."""
        await self._sampler.open()
        return await self._sampler.sample_tokens(request)

    async def poll(self, server: str, report: ReplicaReport) -> Assignment:
        """Serve a poll of a replica of ``server``, a Serve application: see ``RequestQueue.poll``."""
        return await self._sampler.poll(server, report)

    async def cancel(self, session_id: str) -> None:
        """End the calls of ``sample`` that wait for this conversation."""
        for call in self._open:
            if call.session_id == session_id:
                call.is_cancelled = True
                call.answer.cancel()

    async def waiting(self) -> dict[str, float]:
        """The conversations that wait for a completion, and for how many seconds."""
        now = time.monotonic()
        return {call.session_id: now - call.since for call in self._open}

    async def status(self) -> QueueStatus | None:
        """See ``Sampler.status``."""
        return self._sampler.status()
