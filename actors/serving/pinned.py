"""Older versions of a policy, served beside the present one: a replica for each, and the way to it.

Replicas of the present one start their engine as these do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.sampling.served_queues import ServedQueues
from actors.served_agents.recorder import opened_recordings
from actors.serving.recorded_chat import AnswerPlace, recorded_chat
from actors.settings import MANY_CALLS, ServedModel, ServerConfig
from environments.errors import SamplerError, TroupeError
from policies.chat import ChatRenderer, load_tokenizer
from policies.engines.base import Engine, engine_class
from policies.engines.tool_calls import CallReader, served_parser, served_reasoning
from policies.imports import large_imports
from policies.model_api.frontend import Charge, OpenAIFrontend
from policies.model_api.protocol import ChatRequest, CompletionRequest
from policies.model_api.reply import Json


class ServedEngine(NamedTuple):
    """An engine, and what answers with it: the requests of clients, and the tool calls of rollouts."""

    engine: Engine
    openai: OpenAIFrontend
    read_calls: CallReader


async def started_engine(
    model: ServedModel,
    config: ServerConfig,
    store: ray.actor.ActorHandle | None,
    pinned_versions: Mapping[str, int] | None = None,
) -> ServedEngine:
    """The engine of a replica, with the parsers that its settings name, which start first.

    What keeps them from starting is reported to the program: Serve would count attempts.
    """

    def start() -> ServedEngine:
        with large_imports():
            tokenizer = load_tokenizer(model.path)
        renderer = ChatRenderer(tokenizer, model.chat_template_kwargs)
        parser = None if config.tool_parser is None else served_parser(config.tool_parser, tokenizer)
        split = served_reasoning(config.reasoning_parser, tokenizer)
        engine = engine_class(config.engine)(model.path, config.engine, config.adapters)
        engine.version = model.version
        most, adapters = config.access.max_sampled_answers, config.adapters
        openai = OpenAIFrontend(model.name, renderer, engine, adapters, parser, most, pinned_versions, split)
        return ServedEngine(engine, openai, CallReader(renderer, tokenizer, split))

    try:
        # In a thread: while a model is loaded, which takes minutes, Serve has to reach this replica.
        return await asyncio.to_thread(start)
    except Exception as error:
        known = error if isinstance(error, TroupeError) else SamplerError(f"{type(error).__name__}: {error}")
        if store is not None:
            await store.report.remote(known)
        raise


@serve.deployment(max_ongoing_requests=MANY_CALLS)
class PinnedPolicy:
    """An engine with a version that does not change. Replicas of ``PolicyServer`` ask it for answers, and
    with a ``SamplerDirectory`` of its own it samples for agents too.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: ServedModel,
        config: ServerConfig,
        store: ray.actor.ActorHandle | None,
        directory: ray.actor.ActorHandle | None = None,
    ) -> None:
        self._engine, self._openai, read_calls = await started_engine(model, config, store)
        self._recordings = opened_recordings(config.recording)
        self._sampling: asyncio.Task[None] | None = None
        if store is not None and directory is not None:
            context = serve.get_replica_context()
            server = context.app_name + model.policy
            replica = context.replica_id.unique_id
            queues = ServedQueues(replica, server, store, directory, self._engine, read_calls)
            self._sampling = asyncio.create_task(queues.run())

    def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        self._engine.check_alive()
        if self._sampling is not None and self._sampling.done():
            raise SamplerError(f"The replica follows samplers no more: {self._sampling.exception()!r}")

    async def answer(
        self, body: ChatRequest | CompletionRequest, place: AnswerPlace | None
    ) -> AsyncGenerator[tuple[int, Json], None]:
        """Yield the parts of ``OpenAIFrontend``'s answer, with the tokens of each. Raises as it does.

        The answer to a chat is recorded at its ``place``; ``None`` for one that is not.
        """
        tokens: list[int] = []
        if isinstance(body, ChatRequest) and self._recordings is not None and place is not None:
            parts = recorded_chat(self._recordings, self._openai, body, tokens.append, place)
        elif isinstance(body, ChatRequest):
            parts = self._openai.chat(body, tokens.append)
        else:
            parts = self._openai.complete(body, tokens.append)
        async for part in parts:
            cost, tokens[:] = sum(tokens), []
            yield cost, part


class PinnedClient:
    """A replica's way to a pinned version, without Serve's wrapper around errors."""

    def __init__(self, model: ServedModel, replica: DeploymentHandle) -> None:
        self.version = model.version
        self._replica: Any = replica.options(stream=True)

    async def answer(
        self, body: ChatRequest | CompletionRequest, charge: Charge, place: AnswerPlace | None = None
    ) -> AsyncGenerator[Json, None]:
        """Answer as ``OpenAIFrontend.chat`` and ``complete`` do. Close it to stop sampling."""
        parts = self._replica.answer.remote(body, place)
        try:
            async for cost, part in parts:
                charge(cost)
                yield part
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, RayServeException) as error:
            raise SamplerError(f"The replica of {body.model} does not answer: {error}") from error
        finally:
            parts.cancel()  # it has ended, or the client has gone
