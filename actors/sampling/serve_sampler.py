"""The sampler of this cluster's policy server, whose replicas fetch the requests.

It needs no list of the replicas that are alive: one that has stopped fetches nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import ray

from actors.sampling.directory import find_directory
from actors.sampling.node_samplers import combined
from actors.sampling.request_queue import Assignment, ReplicaReport, RequestQueue
from environments.errors import AgentError
from environments.thoughts import is_unfinished
from environments.types import Completion
from policies.imports import without_torch
from policies.pictures import pictures_of
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
        app_name: the Serve application; or those of policies that share a tokenizer, by the policies' names,
            as ``SamplingParams.policy`` has them.
        model_path: folder of the tokenizer and its chat template, or a pickle of this tokenizer, for a node
            that lacks the folder.
        chat_template_kwargs: options of the template, such as ``{"enable_thinking": False}``.
    """

    serves_parsers = True
    serves_adapters = True
    serves_policies = True
    lives_on_each_node = True
    policy_arguments = ("model_path", "chat_template_kwargs")

    def __init__(
        self,
        app_name: str | Mapping[str, str],
        model_path: str | bytes,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from policies.chat import ChatRenderer, load_tokenizer

        self._apps = {"": app_name} if isinstance(app_name, str) else dict(app_name)
        self._queues = {app: RequestQueue(app) for app in self._apps.values()}
        with without_torch():
            tokenizer = (
                load_tokenizer(model_path) if isinstance(model_path, str) else pickle.loads(model_path)
            )
            self._renderer = ChatRenderer(tokenizer, chat_template_kwargs)
        self._directories: dict[str, ray.actor.ActorHandle] = {}

    @classmethod
    def arguments(cls, given: Mapping[str, Any], defaults: SamplerDefaults) -> dict[str, Any]:
        path = {} if defaults.tokenizer_path is None else {"model_path": defaults.tokenizer_path}
        return check_arguments(cls, {**path, **given})

    @property
    def source(self) -> str:
        return f"The policy server {', '.join(map(repr, self._queues))}"

    async def open(self) -> None:
        """Add this actor to the replicas' directories. Raises ``SamplerError`` if a server is missing."""
        for app, queue in self._queues.items():
            if app not in self._directories:
                self._directories[app] = find_directory(app)
            if queue.has_no_replica:
                await self._directories[app].add.remote(ray.get_runtime_context().current_actor)

    async def sample(self, request: SampleRequest) -> Completion:
        """Render, sample, decode. Raises ``AgentError``, ``PromptTooLongError`` or ``SamplerError``."""
        prompt_ids = self._renderer.request_ids(request)
        pictures = pictures_of(request.messages)
        params = request.params_within(len(prompt_ids))
        output = await self.sample_tokens(
            TokenRequest(
                prompt_ids,
                params,
                request.min_version,
                request.session_id,
                request.tool_parser,
                request.tools if request.tool_parser else None,
                pictures,
            )
        )
        text = self._renderer.completion_text(prompt_ids, output.token_ids)
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=output.token_ids,
            logprobs=output.logprobs,
            text=text,
            finish_reason=str(output.finish_reason),
            policy=params.policy.partition("@")[0],
            policy_version=output.policy_version,
            token_versions=output.token_versions,
            tool_calls=() if is_unfinished(text) else output.tool_calls,
            pictures=pictures,
        )

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out. Raises ``AgentError`` for an unknown policy, else as
        ``RequestQueue.sample`` does.
        """
        policy = request.params.policy
        if policy not in self._apps:
            raise AgentError(
                f"An agent has named the policy {policy!r}, and those that are sampled here are "
                f"{', '.join(map(repr, self._apps))}: its `policies` have to list each that it names."
            )
        return await self._queues[self._apps[policy]].sample(request)

    async def poll(self, server: str, report: ReplicaReport) -> Assignment:
        """See ``RequestQueue.poll``."""
        return await self._queues[server].poll(report)

    def status(self) -> QueueStatus:
        """See ``RequestQueue.status``."""
        return combined([queue.status() for queue in self._queues.values()])
