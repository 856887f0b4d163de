"""The actor between the rollout actors and a server: it renders, queues and decodes for all of them.

Rollout actors stay light because everything that needs a tokenizer lives here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import ray

from actors.sampling.request_queue import Assignment, ReplicaReport
from environments.types import Completion
from policies.sampler import QueueStatus, Sampler, SampleRequest, TokenOutput, TokenRequest, check_logprobs


# A request is a call that waits. The limit must never keep a replica's call out.
@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=100_000)
class SamplerActor:
    """Hosts one sampler for all rollout actors of a fleet.

    Args:
        make_sampler: called in the actor's process, so that only this process imports what it needs.
    """

    def __init__(self, make_sampler: Callable[[], Sampler]) -> None:
        self._sampler = make_sampler()
        self._open: dict[int, tuple[str, float]] = {}
        """Of the calls of ``sample`` that wait: the conversation, and when the call came."""
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Connect. Raises ``SamplerError`` if there is nothing to sample."""
        await self._sampler.open()

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion. Raises as ``Sampler.sample`` does, and ``LogprobError``."""
        number = next(self._numbers)
        self._open[number] = (request.session_id, time.monotonic())
        try:
            await self._sampler.open()  # where Ray has started this actor anew, nothing else does
            completion = await self._sampler.sample(request)
        finally:
            del self._open[number]
        check_logprobs(completion.logprobs, self._sampler.source)
        return completion

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out. Raises as ``sample`` does."""
        await self._sampler.open()
        return await self._sampler.sample_tokens(request)

    async def poll(self, report: ReplicaReport) -> Assignment:
        """For the replicas of a policy server: see ``RequestQueue.poll``."""
        assignment: Assignment = await self._sampler.poll(report)
        return assignment

    async def waiting(self) -> dict[str, float]:
        """The conversations that wait for a completion, and for how many seconds."""
        now = time.monotonic()
        return {session_id: now - since for session_id, since in self._open.values()}

    async def status(self) -> QueueStatus | None:
        """See ``Sampler.status``."""
        return self._sampler.status()
