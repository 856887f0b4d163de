"""Trained agents that answer clients, over the real server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from a2a.client import ClientConfig, ClientFactory
from a2a.helpers.proto_helpers import new_text_message
from a2a.types.a2a_pb2 import CancelTaskRequest, GetTaskRequest, Role, SendMessageRequest, TaskState
from machine import wait_until
from mcp import Client
from ray import serve
from ray.exceptions import RayTaskError
from scripted_engine import ScriptedEngine  # noqa: F401  # so that a replica can import it too

from actors.rollouts.rollout import Pair, RolloutLimits
from actors.sampling.serve_sampler import ServeSampler
from actors.served_agents.pool import AgentPool
from actors.serving.policy_app import PolicyApp
from actors.settings import FleetConfig, ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.errors import PartLostError
from environments.types import StepEvent, TerminationReason, Trajectory
from launch.recipes.calculator import task_from_message, workload
from policies.agent_api.context import RequestContext, TokenUsage
from policies.model_api.errors import RequestError
from policies.sampler import SamplingParams
from policies.settings import EngineConfig

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


def task_of(message: str) -> Any:
    if message == "none":
        return None
    return {}[message] if message == "no task" else task_from_message(message)


def new_pool(server: str, model: Path, pair: Pair, limits: RolloutLimits) -> ray.actor.ActorHandle:
    """Agents with one rollout actor."""
    sampler = partial(ServeSampler, server, str(model))
    return AgentPool.remote(pair, task_of, sampler, limits, FleetConfig(num_actors=1), "Adds numbers.")


@contextmanager
def serving(
    name: str, agents: ray.actor.ActorHandle, model: Path, port: int, engine: EngineConfig
) -> Iterator[PolicyApp]:
    app = PolicyApp(
        name,
        ServedModel(path=str(model)),
        ServerConfig(engine=engine, http_port=port),
        WeightStore.remote(),
        agents={"agent/calculator": agents},
    )
    app.start()
    yield app
    app.stop()


@pytest.fixture(scope="module")
def served(serve_port: int, tiny_model: Path) -> Iterator[tuple[PolicyApp, ray.actor.ActorHandle]]:
    """Agents, and their server, whose engine calls the calculator and then says 46, in turns.

    Its script has no memory of who asks: one episode comes after the other. The last test ends the agents.
    """
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options={"replies": [CALL, "\\boxed{46}"]})
    agents = new_pool("agents", tiny_model, workload(0).pair, RolloutLimits())
    with serving("agents", agents, tiny_model, serve_port, engine) as app:
        yield app, agents


@pytest.fixture(scope="module")
def agents(served: tuple[PolicyApp, ray.actor.ActorHandle]) -> ray.actor.ActorHandle:
    return served[1]


def played(
    agents: ray.actor.ActorHandle, params: SamplingParams, message: str = "What is 12+34?"
) -> list[StepEvent | Trajectory]:
    """The steps of an episode and the whole, without the tokens in between."""
    asked = agents.play.remote(message, params, RequestContext())
    parts = [ray.get(part, timeout=200) for part in asked]
    return [part for part in parts if not isinstance(part, TokenUsage)]


def test_message_is_answered_by_an_episode_with_tools(agents: ray.actor.ActorHandle) -> None:
    params = SamplingParams(temperature=0)
    for _ in range(2):
        *steps, trajectory = played(agents, params)
        assert isinstance(trajectory, Trajectory)
        assert trajectory.termination_reason is TerminationReason.ENV_DONE
        assert [step.model_response for step in trajectory.steps] == [CALL, "\\boxed{46}"]
        assert "46" in str(trajectory.steps[1].chat_completions)
        assert [(step.text, step.done) for step in steps] == [(CALL, False), ("\\boxed{46}", True)]
        assert "46" in steps[0].observation
        used = [each.num_prompt_tokens + each.num_completion_tokens for each in trajectory.completions]
        assert [step.num_tokens for step in steps] == used


def test_a2a_and_mcp_clients_are_answered_through_serve(
    agents: ray.actor.ActorHandle, serve_port: int
) -> None:
    url = f"http://127.0.0.1:{serve_port}"
    assert asyncio.run(states_and_answer(url)) == (["SUBMITTED", "WORKING", "COMPLETED"], "\\boxed{46}")
    assert asyncio.run(tool_answer(url)) == "\\boxed{46}"


async def states_and_answer(url: str) -> tuple[list[str], str]:
    """What a stream of A2A tells of a message."""
    states, answer = [], ""
    async with httpx.AsyncClient(timeout=60) as http:
        client = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(url)
        message = new_text_message("What is 12+34?", role=Role.ROLE_USER)
        async for event in client.send_message(SendMessageRequest(message=message)):
            if event.HasField("artifact_update"):
                answer += event.artifact_update.artifact.parts[0].text
            else:
                told = event.task if event.HasField("task") else event.status_update
                states.append(TaskState.Name(told.status.state).removeprefix("TASK_STATE_"))
    return states, answer


async def tool_answer(url: str) -> str:
    async with Client(f"{url}/mcp") as client:
        result = await client.call_tool("ask_calculator", {"message": "What is 12+34?"})
    return str(result.content[0].text)


def test_message_is_withdrawn_while_it_waits_and_is_played(agents: ray.actor.ActorHandle) -> None:
    for key in ("first", "second"):
        parts = agents.play.remote("What is 12+34?", SamplingParams(), RequestContext(withdraw_key=key))
        wait_until(lambda key=key: ray.get(agents.call.remote("messages", "withdraw", "", key)))
        with pytest.raises(RayTaskError) as raised:
            [ray.get(part, timeout=200) for part in parts]
        assert isinstance(raised.value.cause, RequestError) and raised.value.cause.code == "withdrawn"
    assert not any(ray.get(agents.call.remote("messages", "withdraw", "", key)) for key in ("first", "none"))
    assert isinstance(played(agents, SamplingParams())[-1], Trajectory), "the rollout actor is free"


@pytest.mark.parametrize(
    ("message", "named"), [("no task", "KeyError"), ("none", "TypeError: it returned None")]
)
def test_message_that_makes_no_task_is_an_error(
    agents: ray.actor.ActorHandle, message: str, named: str
) -> None:
    with pytest.raises(RayTaskError, match=f"task_from_message failed: {named}"):
        played(agents, SamplingParams(), message)


def test_agents_that_have_ended_are_an_error_of_their_server(
    served: tuple[PolicyApp, ray.actor.ActorHandle],
) -> None:
    app, agents = served
    app.check()
    ray.kill(agents)
    with pytest.raises(PartLostError, match="Clients get no answers any more"):
        wait_until(lambda: app.check() is not None)  # type: ignore[func-returns-value]


def test_message_before_agents_are_open_is_to_come_again(ray_cluster: None, tiny_model: Path) -> None:
    agents = new_pool("agents", tiny_model, workload(0).pair, RolloutLimits())
    with pytest.raises(RayTaskError, match="still starting: ask again"):
        played(agents, SamplingParams())
    ray.kill(agents)


@pytest.fixture(scope="module")
def slow(serve_port: int, tiny_model: Path) -> Iterator[str]:
    """The address of an agent with one rollout actor, whose episodes would take minutes."""
    engine = EngineConfig(
        name="scripted_engine:ScriptedEngine",
        options={"replies": [CALL], "seconds_per_token": 0.05},
        max_model_tokens=50_000,
    )
    pair, limits = workload(0).pair, RolloutLimits(max_steps=100, max_response_tokens=50_000)
    pair = replace(pair, env_args=pair.env_args | {"max_steps": 100})
    serve.delete("agents")  # if it is still there: Serve gives a route to one server at a time
    with serving("slow", new_pool("slow", tiny_model, pair, limits), tiny_model, serve_port, engine):
        yield f"http://127.0.0.1:{serve_port}"


def stands_still(count: Callable[[], int], seconds: float = 1.0) -> bool:
    before = count()
    time.sleep(seconds)
    return count() == before


def test_nothing_more_is_sampled_for_a_client_that_has_gone(slow: str) -> None:
    """Over real HTTP, with one rollout actor: an episode that goes on is longer than what is waited for."""
    question = {"role": "user", "content": "What is 12+34?"}
    body = {"model": "agent/calculator", "messages": [question], "stream": True}

    def num_sampled() -> int:
        metrics = httpx.get(f"{slow}/metrics", timeout=60).text
        return int(re.findall(r"sampled_tokens_total (\d+)", metrics)[0])

    def first_step() -> None:
        with httpx.stream("POST", f"{slow}/v1/chat/completions", json=body, timeout=60) as answer:
            assert json.loads(next(answer.iter_lines())[6:])["step"]["number"] == 1

    first_step()
    wait_until(lambda: stands_still(num_sampled), 60)
    for _ in range(20):  # one of fifteen was played to its end, when Ray took back the cancellation too
        with pytest.raises(httpx.ReadTimeout):  # hangs up before it hears anything
            httpx.post(f"{slow}/v1/chat/completions", json=body | {"stream": False}, timeout=0.4)
    wait_until(lambda: stands_still(num_sampled), 60)
    first_step()  # the rollout actor is free


def test_task_of_a2a_goes_on_when_its_client_has_hung_up(slow: str) -> None:
    """Through Serve, which cancels a request whose client has gone, and all calls that were made in it."""

    async def talk() -> str:
        async with httpx.AsyncClient(timeout=60) as http:
            client = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(slow)
            message = new_text_message("What is 12+34?", role=Role.ROLE_USER)
            stream = client.send_message(SendMessageRequest(message=message))
            task = (await anext(stream)).task
            while (await state_of(client, task.id)) == "TASK_STATE_SUBMITTED":
                await asyncio.sleep(0.1)
            await stream.aclose()
            await asyncio.sleep(0.5)
            state = await state_of(client, task.id)
            await client.cancel_task(CancelTaskRequest(id=task.id))
        return state

    async def state_of(client: Any, task_id: str) -> str:
        return TaskState.Name((await client.get_task(GetTaskRequest(id=task_id))).status.state)

    assert [asyncio.run(talk()) for _ in range(3)] == ["TASK_STATE_WORKING"] * 3
