"""The actor between the rollout actors and a server: it renders, queues and decodes for all of them.

Rollout actors stay light because everything that needs a tokenizer lives here. The replicas of a policy
server fetch what waits here, in batches: nobody has to know which of them are alive, and one that is stopped
fetches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from actors.sampling.request_queue import Assignment, QueueStatus, ReplicaReport, RequestQueue
from environments.errors import SamplerError
from environments.types import Completion
from policies.sampler import Sampler, SampleRequest, TokenOutput, TokenRequest


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
        """One completion. Raises ``AgentError``, ``PromptTooLongError`` or ``SamplerError``."""
        await self._sampler.open()  # where Ray has started this actor anew, nobody else does
        return await self._sampler.sample(request)

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out, by a policy server. Raises as ``sample`` does."""
        await self._sampler.open()
        return await self._served.sample_tokens(request)

    async def poll(self, report: ReplicaReport) -> Assignment:
        """For the replicas of a policy server: see ``RequestQueue.poll``."""
        return await self._served.queue.poll(report)

    async def status(self) -> QueueStatus | None:
        """What waits and which replicas are at work; ``None`` where that is an outside server's affair."""
        return self._sampler.queue.status() if isinstance(self._sampler, ServeSampler) else None

    @property
    def _served(self) -> ServeSampler:
        assert isinstance(self._sampler, ServeSampler), (
            "an outside server has no replicas and takes no tokens"
        )
        return self._sampler


class ServeSampler:
    """Samples the policy server of this cluster: its replicas fetch the requests from ``queue``.

    The Ray actor that owns this has to have a method ``poll``, which is the queue's.

    Args:
        app_name: the Serve application.
        model_path: folder of the tokenizer and its chat template.
        chat_template_kwargs: options of the template, such as ``{"enable_thinking": False}``.
    """

    def __init__(
        self, app_name: str, model_path: str, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        from policies.chat import ChatRenderer, load_tokenizer

        self.queue = RequestQueue(app_name)
        self._app_name = app_name
        self._renderer = ChatRenderer(load_tokenizer(model_path), chat_template_kwargs)
        self._directory: ray.actor.ActorHandle | None = None

    async def open(self) -> None:
        """Let the replicas know of this actor. Raises ``SamplerError`` if there is no such application."""
        if self._directory is None:
            self._directory = await self._find_directory()
        if self.queue.is_deserted:
            await self._directory.add.remote(ray.get_runtime_context().current_actor)

    async def _find_directory(self) -> ray.actor.ActorHandle:
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            handle = serve.get_app_handle(self._app_name)
            return await handle.sampler_directory.remote()
        except RayServeException as error:
            raise SamplerError(f"No policy server is called {self._app_name!r} here: {error}") from error

    async def sample(self, request: SampleRequest) -> Completion:
        """Render, sample, decode. Raises ``AgentError``, ``PromptTooLongError`` or ``SamplerError``."""
        prompt_ids = self._renderer.request_ids(request)
        params = request.params_within(len(prompt_ids))
        output = await self.sample_tokens(
            TokenRequest(prompt_ids, params, request.min_version, request.session_id)
        )
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=output.token_ids,
            logprobs=output.logprobs,
            text=self._renderer.decode(output.token_ids),
            finish_reason=str(output.finish_reason),
            policy_version=output.policy_version,
            token_versions=output.token_versions,
        )

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out. Raises as ``RequestQueue.sample`` does."""
        return await self.queue.sample(request)
