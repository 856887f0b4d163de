"""A replica of the policy server: it samples the current policy for rollouts, and is an OpenAI server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
from fastapi import Request
from fastapi.responses import PlainTextResponse
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from actors.sampling.queue_worker import ReadCalls
from actors.sampling.served_queues import ServedQueues
from actors.served_agents.client import PoolClient
from actors.served_agents.protocols import ServedAgents
from actors.served_agents.recorder import opened_recordings
from actors.serving.access import Access
from actors.serving.agent_routes import agent_routes
from actors.serving.autoscaling import TOKENS_IN_FLIGHT
from actors.serving.errors import MODELS_PATH
from actors.serving.http import http, welcome_text
from actors.serving.keys import ApiKeys
from actors.serving.metrics import METRICS_PATH
from actors.serving.pinned import PinnedClient, started_engine
from actors.serving.policy_routes import policy_routes
from actors.serving.stored_responses import SharedResponses
from actors.settings import MANY_CALLS, ServedModel, ServerConfig
from actors.weights.follower import WeightFollower, open_transport
from actors.weights.transport import WeightTransport
from actors.weights.turns import follow_turns, wait_for_turn
from environments.errors import SamplerError
from policies.agent_api.frontend import PREFIX

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The engine's thread needs the interpreter's lock all the time: each further thread of a replica slows it
# down, and so does a line of log per request.
REPLICA_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
SWITCH_SECONDS = 0.0005
LOGGING = {"enable_access_log": False}


async def _unless_gone(call: Awaitable[T]) -> T:
    """The result of ``call`` to an actor of the program that has started this application.

    If that actor is dead, the program was killed, and this deletes the application: Serve has not died with
    the program, and would start replicas for ever.
    """
    try:
        return await call
    except ActorDiedError:
        name = serve.get_replica_context().app_name
        logger.warning("The program that has started %s is gone, so this application ends.", name)
        await asyncio.to_thread(serve.delete, name, _blocking=False)
        raise


def _this_replica() -> ray.actor.ActorHandle:
    return ray.get_runtime_context().current_actor


http.include_router(policy_routes)
http.include_router(agent_routes)


@serve.deployment(max_ongoing_requests=MANY_CALLS)
@serve.ingress(http)
class PolicyServer:
    """Replica of the server: an engine that follows a ``WeightStore``, and samples for all actors in a
    ``SamplerDirectory``.

    A replica that starts late loads the newest version before it takes a request. Without a store it serves
    the model that it was started with, to clients over HTTP only.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: ServedModel,
        config: ServerConfig,
        store: ray.actor.ActorHandle | None,
        directory: ray.actor.ActorHandle | None,
        keys: ApiKeys = ApiKeys(),  # noqa: B008  # it is frozen
        agents: Mapping[str, ray.actor.ActorHandle] | None = None,
        pinned: Mapping[str, tuple[ServedModel, DeploymentHandle]] | None = None,
    ) -> None:
        # The engine's thread gives the interpreter's lock away at every tensor operation, and has to ask for
        # it again: at Python's 5 ms the replica answered an eighth fewer requests.
        sys.setswitchinterval(SWITCH_SECONDS)
        self.access = Access(keys, config)
        self.recordings = opened_recordings(config.recording)
        transport = None if store is None else await _unless_gone(open_transport(store))
        self.pinned = {name: PinnedClient(*each) for name, each in (pinned or {}).items()}
        if config.colocated:
            await _unless_gone(wait_for_turn(store, _this_replica()))
        versions = {name: client.version for name, client in self.pinned.items()}
        self._engine, self.openai, read_calls = await started_engine(model, config, store, versions)
        self.responses = SharedResponses(directory)
        self.agents = ServedAgents(
            {name: PoolClient(pool) for name, pool in (agents or {}).items()},
            config.agents,
            needs_key=bool(keys),
            version=lambda: self._engine.version,
            count=self.access.metrics.episode,
            recordings=self.recordings,
        )
        self.openai.beside = tuple(self.agents.pools)
        self._followers: list[asyncio.Task[None]] = []
        if store is not None and directory is not None and transport is not None:
            await self._follow_program(store, transport, directory, read_calls)
        if config.colocated:
            turns = follow_turns(store, _this_replica(), self._engine)
            self._followers.append(asyncio.create_task(_unless_gone(turns)))

    async def _follow_program(
        self,
        store: ray.actor.ActorHandle,
        transport: WeightTransport,
        directory: ray.actor.ActorHandle,
        read_calls: ReadCalls,
    ) -> None:
        """Load the newest weights, and from now on those that come, and sample for the program's rollouts."""
        context = serve.get_replica_context()
        weights = WeightFollower(store, transport, self._engine, lambda: queues.wake())
        queues = ServedQueues(
            context.replica_id.unique_id,
            context.app_name,
            store,
            directory,
            self._engine,
            read_calls,
            weights.catch_up,
        )
        await _unless_gone(weights.catch_up())
        self._followers = [
            asyncio.create_task(_unless_gone(weights.run())),
            asyncio.create_task(_unless_gone(queues.run())),
        ]

    # -- versions ------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Serve replaces the replica if this raises: the engine has failed, or weights do not arrive."""
        self._engine.check_alive()
        for follower in self._followers:
            if follower.done():
                raise SamplerError(
                    f"The replica follows weights, turns or samplers no more: {follower.exception()!r}"
                )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report tokens in flight, by which Serve chooses the number of replicas."""
        return {TOKENS_IN_FLIGHT: self._engine.tokens_in_flight}

    # -- clients over HTTP ---------------------------------------------------------------------------

    @http.get("/")
    async def welcome(self, request: Request) -> PlainTextResponse:
        names = [model["id"] for model in (await self.models())["data"]]
        url = self.access.address_for(request)
        return PlainTextResponse(welcome_text(names, f"{url}/v1"))

    @http.get("/health")
    async def health(self) -> dict[str, Any]:
        self.check_health()
        return {"status": "ok", "policy_version": self._engine.version}

    @http.get("/ready")
    async def ready(self) -> dict[str, Any]:
        """Check that all that is served can answer, agents too: status 503 until then."""
        await asyncio.gather(*(pool.check() for pool in self.agents.pools.values()))
        return await self.health()

    @http.get(METRICS_PATH)
    async def metrics(self) -> PlainTextResponse:
        engine, waiting = self._engine, self.openai.num_waiting
        text = self.access.metrics.text(engine.version, engine.stats(), waiting, engine.tokens_in_flight)
        return PlainTextResponse(text)

    @http.get(MODELS_PATH)
    async def models(self) -> dict[str, Any]:
        models = self.openai.models()
        return {**models, "data": models["data"] + self.agents.chat.models()}

    @http.get(f"{MODELS_PATH}/{{name:path}}")
    async def model(self, name: str) -> dict[str, Any]:
        return (self.agents.chat if name.startswith(PREFIX) else self.openai).model(name)
