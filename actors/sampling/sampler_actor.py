"""The actor between the rollout actors and a server: it renders, queues and decodes for all of them.

Rollout actors stay light because everything that needs a tokenizer lives here.
"""

from __future__ import annotations

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

    async def open(self) -> None:
        """Connect. Raises ``SamplerError`` if there is nothing to sample."""
        await self._sampler.open()

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion. Raises as ``Sampler.sample`` does, and ``LogprobError``."""
        await self._sampler.open()  # where Ray has started this actor anew, nothing else does
        completion = await self._sampler.sample(request)
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

    async def status(self) -> QueueStatus | None:
        """See ``Sampler.status``."""
        return self._sampler.status()
