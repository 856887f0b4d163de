"""The sampler of this cluster's policy server, whose replicas fetch the requests.

It needs no list of the replicas that are alive: one that has stopped fetches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from actors.sampling.request_queue import Assignment, ReplicaReport, RequestQueue
from environments.errors import SamplerError
from environments.thoughts import is_unfinished
from environments.types import Completion
from policies.sampler import (
    QueueStatus,
    Sampler,
    SamplerDefaults,
    SampleRequest,
    TokenOutput,
    TokenRequest,
    check_arguments,
)


class ServeSampler(Sampler):
    """Samples the policy server of this cluster: its replicas fetch the requests from the queue here.

    The Ray actor that owns this has to have a method ``poll``, which calls the one here.

    Args:
        app_name: the Serve application.
        model_path: folder of the tokenizer and its chat template.
        chat_template_kwargs: options of the template, such as ``{"enable_thinking": False}``.
    """

    serves_parsers = True
    serves_adapters = True
    lives_on_each_node = True
    policy_arguments = ("model_path", "chat_template_kwargs")

    def __init__(
        self, app_name: str, model_path: str, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        from policies.chat import ChatRenderer, load_tokenizer

        self._queue = RequestQueue(app_name)
        self._app_name = app_name
        self._renderer = ChatRenderer(load_tokenizer(model_path), chat_template_kwargs)
        self._directory: ray.actor.ActorHandle | None = None

    @classmethod
    def arguments(cls, given: Mapping[str, Any], defaults: SamplerDefaults) -> dict[str, Any]:
        path = {} if defaults.tokenizer_path is None else {"model_path": defaults.tokenizer_path}
        return check_arguments(cls, {**path, **given})

    @property
    def source(self) -> str:
        return f"The policy server {self._app_name!r}"

    async def open(self) -> None:
        """Add this actor to the replicas' directory. Raises ``SamplerError`` without such an application."""
        if self._directory is None:
            self._directory = await self._find_directory()
        if self._queue.has_no_replica:
            await self._directory.add.remote(ray.get_runtime_context().current_actor)

    async def _find_directory(self) -> ray.actor.ActorHandle:
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            handle = serve.get_app_handle(self._app_name)
            directory = await handle.sampler_directory.remote()
        except RayServeException as error:
            raise SamplerError(f"No policy server is called {self._app_name!r} here: {error}") from error
        if directory is None:
            raise SamplerError(
                f"The policy server {self._app_name!r} was started by `serve deploy` and answers over "
                "HTTP only: use engine_name='openai' with its base_url."
            )
        return directory

    async def sample(self, request: SampleRequest) -> Completion:
        """Render, sample, decode. Raises ``AgentError``, ``PromptTooLongError`` or ``SamplerError``."""
        prompt_ids = self._renderer.request_ids(request)
        params = request.params_within(len(prompt_ids))
        output = await self.sample_tokens(
            TokenRequest(
                prompt_ids,
                params,
                request.min_version,
                request.session_id,
                request.tool_parser,
                request.tools if request.tool_parser else None,
            )
        )
        text = self._renderer.completion_text(prompt_ids, output.token_ids)
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=output.token_ids,
            logprobs=output.logprobs,
            text=text,
            finish_reason=str(output.finish_reason),
            policy_version=output.policy_version,
            token_versions=output.token_versions,
            tool_calls=() if is_unfinished(text) else output.tool_calls,
        )

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out. Raises as ``RequestQueue.sample`` does."""
        return await self._queue.sample(request)

    async def poll(self, report: ReplicaReport) -> Assignment:
        """See ``RequestQueue.poll``."""
        return await self._queue.poll(report)

    def status(self) -> QueueStatus:
        """See ``RequestQueue.status``."""
        return self._queue.status()
