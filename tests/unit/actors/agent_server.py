"""The real HTTP application with an agent, on a port of this machine: a scripted rollout service, no Ray."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from test_policy_http import Parts, serving

from actors.rollouts.fleet_report import FleetStatus
from actors.rollouts.rollout import Pair, RolloutRequest
from actors.served_agents import pool as agent_pool
from actors.served_agents.recorder import AnswerRecorder, opened_recordings
from actors.serving.http import http
from actors.serving.keys import ApiKeys
from actors.settings import AgentsConfig, FleetConfig, RecordingConfig
from environments import BaseEnv, ToolEnvironment
from environments.types import Completion, Step, StepEvent, TerminationReason, Trajectory
from policies import ToolAgent

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEYS = ApiKeys(
    {name: hashlib.sha256(key.encode()).digest() for name, key in (("alice", ALICE), ("bob", BOB))}
)
AGENT = "agent/calculator"


class ScriptedService:
    """Stands in for the rollout service: says 46 to everything, in the order and when it is told to. The
    present version is 7.

    A message waits for an actor while it is in ``waiting``; ``take`` lets an actor play it for as long as the
    test wants.
    """

    def __init__(self, *_: Any) -> None:
        self.waiting: dict[str, RolloutRequest] = {}
        self.asked: list[RolloutRequest] = []
        """All messages, in their order."""
        self.forgotten: list[str] = []
        """The rollouts after which no message comes."""
        self.is_busy = False
        """Whether messages wait, instead of being answered at once."""
        self.failure: Exception | None = None
        """Error of the fleet, once it has one."""
        self.consumer: Any = None
        """The pool, which is given each trajectory in its event loop, from whatever thread."""
        self._loop: asyncio.AbstractEventLoop

    def reset(self) -> None:
        """Answer at once from now on; forget what waits."""
        self.is_busy = False
        for each in (self.waiting, self.asked, self.forgotten):
            each.clear()

    async def start(self, num_actors: int) -> None:
        self._loop = asyncio.get_running_loop()

    async def status(self) -> FleetStatus:
        if self.failure is not None:
            raise self.failure
        return FleetStatus(num_actors=1, num_ready=1)

    async def submit(self, request: RolloutRequest) -> None:
        self.asked.append(request)
        if self.is_busy:
            self.waiting[request.rollout_id] = request
        else:
            self.finish(request)

    def cancel(self, rollout_id: str) -> None:
        self.waiting.pop(rollout_id, None)

    def forget(self, rollout_id: str) -> None:
        self.forgotten.append(rollout_id)

    def take(self) -> RolloutRequest:
        """The oldest message, which waits no more."""
        return self.waiting.pop(min(self.waiting))

    def finish(self, request: RolloutRequest) -> None:
        completion = Completion(
            text="46",
            prompt_ids=(1,) * 10,
            completion_ids=(1,),
            logprobs=(0.0,),
            finish_reason="stop",
            policy_version=int(request.params.policy.removeprefix("@") or 7),
        )
        trajectory = Trajectory(
            rollout_id=request.rollout_id,
            task=request.task,
            steps=[Step(model_response="46", completion=completion)],
            termination_reason=TerminationReason.ENV_DONE,
        )
        self._deliver(trajectory)

    def fail(self, request: RolloutRequest, error: str) -> None:
        reason = TerminationReason.ENV_ERROR
        self._deliver(Trajectory(rollout_id=request.rollout_id, termination_reason=reason, error=error))

    def _deliver(self, trajectory: Trajectory) -> None:
        asyncio.run_coroutine_threadsafe(self.consumer.put([trajectory]), self._loop)


class LocalActor:
    """An object of this process that is called like a Ray actor."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._instance, name)
        return SimpleNamespace(remote=partial(Parts, method) if name == "play" else method)


@dataclass
class AgentServer:
    """Where the application answers, and what plays its messages."""

    url: str
    service: ScriptedService
    on_step: Callable[[str, StepEvent], None]
    """Tells the agents' pool of a step of the rollout of this id."""


@contextmanager
def agent_server(
    folder: Path,
    keys: ApiKeys = ApiKeys(),  # noqa: B008  # it is frozen
    agents: Sequence[str] = (AGENT,),
    env_class: type[BaseEnv] = ToolEnvironment,
    settings: AgentsConfig = AgentsConfig(),  # noqa: B008  # nobody changes it
    recording: RecordingConfig = RecordingConfig(),  # noqa: B008  # nobody changes it
    **served: Any,
) -> Iterator[AgentServer]:
    """The server, with one pool for all ``agents``; ``served`` goes to ``serving``."""
    service, recordings = ScriptedService(), opened_recordings(recording)
    policies = {name: model.policy for name, (model, _) in served.get("pinned", {}).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_pool, "AsyncRolloutService", lambda *_, **__: service)
        context = SimpleNamespace(current_actor=None)
        patch.setattr(agent_pool.ray, "get_runtime_context", lambda: context)
        pool_class = agent_pool.AgentPool.__ray_metadata__.modified_class
        pair = Pair(agent_class=ToolAgent, env_class=env_class)
        pool = pool_class(
            pair,
            lambda text: {"question": text},
            None,
            None,
            FleetConfig(),
            "Adds numbers.",
            settings,
            None if recordings is None else AnswerRecorder(recordings, AGENT, policies),
        )
    service.consumer = pool
    pools = {name: LocalActor(pool) for name in agents}
    with serving(folder, agents=pools, keys=keys, recording=recording, **served) as client:
        assert client.portal is not None
        client.portal.call(pool.open)
        with listening(client) as url:
            yield AgentServer(url, service, partial(client.portal.call, pool.on_step))


@contextmanager
def listening(client: TestClient) -> Iterator[str]:
    """Address on which the application answers, in the loop of its test client."""
    assert client.portal is not None
    server = uvicorn.Server(uvicorn.Config(http, port=0, lifespan="off", log_level="warning"))
    served = client.portal.start_task_soon(server.serve)
    while not server.started:
        assert not served.done(), served.exception()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        served.result(60)
