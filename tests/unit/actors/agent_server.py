"""The real HTTP application with an agent, on a port of this machine: a scripted rollout service, no Ray."""

from __future__ import annotations

import hashlib
import queue
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

from actors.rollouts.rollout import Pair, RolloutRequest
from actors.served_agents import pool as agent_pool
from actors.serving.http import http
from actors.serving.keys import ApiKeys
from actors.settings import AgentsConfig, FleetConfig
from environments import BaseEnv, ToolEnvironment
from environments.types import Completion, Step, StepEvent, TerminationReason, Trajectory
from policies import ToolAgent

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEYS = ApiKeys(
    {name: hashlib.sha256(key.encode()).digest() for name, key in (("alice", ALICE), ("bob", BOB))}
)
AGENT = "agent/calculator"


class ScriptedService:
    """Stands in for the rollout service: says 46 to everything, in the order and when it is told to.

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
        self._finished: queue.Queue[Trajectory | None] = queue.Queue()
        self.stream = SimpleNamespace(trajectories=self._trajectories)
        self.detached_fleet = self

    def reset(self) -> None:
        """Answer at once from now on; forget what waits."""
        self.is_busy = False
        for each in (self.waiting, self.asked, self.forgotten):
            each.clear()

    def start(self, num_actors: int) -> None:
        pass

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
            policy_version=7,
        )
        self._finished.put(
            Trajectory(
                rollout_id=request.rollout_id,
                task=request.task,
                steps=[Step(model_response="46", completion=completion)],
                termination_reason=TerminationReason.ENV_DONE,
            )
        )

    def fail(self, request: RolloutRequest, error: str) -> None:
        reason = TerminationReason.ENV_ERROR
        self._finished.put(Trajectory(rollout_id=request.rollout_id, termination_reason=reason, error=error))

    def end(self) -> None:
        self._finished.put(None)

    def _trajectories(self, count: int) -> Iterator[Trajectory]:
        for _ in range(count):
            trajectory = self._finished.get()
            if trajectory is None:
                raise ConnectionError("the test has ended")
            yield trajectory


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
    **served: Any,
) -> Iterator[AgentServer]:
    """The server, with one pool for all ``agents``; ``served`` goes to ``serving``."""
    service = ScriptedService()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_pool, "RolloutService", lambda *_, **__: service)
        context = SimpleNamespace(current_actor=None)
        patch.setattr(agent_pool.ray, "get_runtime_context", lambda: context)
        pool_class = agent_pool.AgentPool.__ray_metadata__.modified_class
        pair = Pair(agent_class=ToolAgent, env_class=env_class)
        pool = pool_class(
            pair, lambda text: {"question": text}, None, None, FleetConfig(), "Adds numbers.", settings
        )
    pools = {name: LocalActor(pool) for name in agents}
    try:
        with serving(folder, agents=pools, keys=keys, **served) as client:
            assert client.portal is not None
            client.portal.call(pool.open)
            with listening(client) as url:
                yield AgentServer(url, service, partial(client.portal.call, pool.on_step))
    finally:
        service.end()  # when the pool's loops are cancelled


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
