"""A conversation with a served agent goes on in the same environment, in real processes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from a2a_client import connected, only_task, question, state
from machine import wait_until
from openai import OpenAI
from ray.exceptions import RayTaskError

from actors.rollouts.rollout import Pair, RolloutLimits
from actors.sampling.serve_sampler import ServeSampler
from actors.served_agents.pool import AgentPool
from actors.serving.policy_app import PolicyApp
from actors.settings import AgentsConfig, FleetConfig, ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.base import BaseEnv
from environments.types import Trajectory
from policies import GameAgent
from policies.agent_api.context import RequestContext
from policies.agent_api.history import with_message
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError
from policies.sampler import SamplingParams, ScriptedSampler
from policies.settings import EngineConfig

SLOW = "Take your time."
BEGUN, GO_ON = ".begun", ".go-on"
"""Suffixes of the files, beside the notebooks, by which a slow message says that it has begun, and waits."""


class NotebookEnv(BaseEnv):
    """Writes down what the agent says; ``folder`` has a file for each notebook that was closed."""

    resumes_by = "replay"

    def __init__(self, folder: str) -> None:
        self.folder, self.pages = Path(folder), list[str]()
        self.number = f"{os.getpid()}-{time.monotonic_ns()}"

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        return {"question": "Begin."}, {}

    def follow_up(self, message: str) -> tuple[str, dict[str, Any]]:
        if message == SLOW:
            self.folder.with_suffix(BEGUN).touch()
            wait_until(self.folder.with_suffix(GO_ON).exists, 60)
        return message, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.pages.append(str(action))
        facts = {"pages": list(self.pages), "process": os.getpid(), "number": self.number}
        return "", 1.0, True, facts

    def close(self) -> None:
        with (self.folder / self.number).open("a") as file:
            file.write("closed\n")

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> NotebookEnv:  # type: ignore[override]
        return cls(info["folder"])


class LostNotebookEnv(NotebookEnv):
    """Cannot be rebuilt."""

    resumes_by = None


class LoggedNotebookEnv(NotebookEnv):
    """Says in a file how many pages which notebook has after each answer."""

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        outcome = super().step(action)
        with (self.folder / "log").open("a") as file:
            file.write(f"{self.number} {len(self.pages)}\n")
        return outcome


class MoodyNotebookEnv(NotebookEnv):
    """Says that it can be rebuilt, but answers each time something else."""

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return self.number, *rest  # type: ignore[return-value]


def echo(messages: list[dict[str, Any]]) -> str:
    return f"page {sum(message['role'] == 'user' for message in messages)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture
def slow_files(folder: Path) -> tuple[Path, Path]:
    """Those of the next slow message."""
    begun, go_on = folder.with_suffix(BEGUN), folder.with_suffix(GO_ON)
    begun.unlink(missing_ok=True)
    go_on.unlink(missing_ok=True)
    return begun, go_on


@pytest.fixture(scope="module")
def start(ray_cluster: None, folder: Path) -> Iterator[Callable[..., Any]]:
    """``start(...)``: a pool, the same one for the same arguments. Starting one takes ten seconds."""
    pools = {}

    @functools.cache
    def start_pool(
        env_class: type[BaseEnv] = NotebookEnv, num_actors: int = 1, max_actors: int = 0, **settings: Any
    ) -> ray.actor.ActorHandle:
        pool = AgentPool.remote(
            Pair(agent_class=GameAgent, env_class=env_class, env_args={"folder": str(folder)}),
            lambda message: {"question": message},
            partial(ScriptedSampler, echo),
            RolloutLimits(),
            FleetConfig(num_actors=num_actors, max_actors=max_actors or num_actors),
            "Takes notes.",
            AgentsConfig(unknown_history="replay", **settings),
        )
        ray.get(pool.open.remote(), timeout=180)
        pools[pool] = True
        return pool

    yield start_pool
    for pool in pools:
        ray.kill(pool)


def say(pool: Any, message: str = "Go on.", **place: Any) -> dict[str, Any]:
    """What the notebook says of itself after an answer."""
    return told(pool.play.remote(message, SamplingParams(), RequestContext(**place)))


def told(parts: Any) -> dict[str, Any]:
    *_, trajectory = [ray.get(part, timeout=200) for part in parts]
    assert isinstance(trajectory, Trajectory) and len(trajectory.steps) == 1, trajectory
    return trajectory.steps[0].info


def closed(folder: Path) -> dict[str, int]:
    """How often each notebook was closed."""
    return {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}


def error_of(call: Callable[[], Any]) -> RequestError:
    with pytest.raises(RayTaskError) as raised:
        call()
    assert isinstance(raised.value.cause, RequestError), raised.value
    return raised.value.cause


def test_environment_keeps_its_state_over_three_messages(start: Any, folder: Path) -> None:
    pool = start()
    first = say(pool, answer_id="1", can_be_followed=True)
    second = say(pool, after="1", answer_id="2", can_be_followed=True)
    third = say(pool, after="2", answer_id="3", can_be_followed=True)
    assert third["pages"] == ["page 1", "page 2", "page 3"]
    assert first["number"] == second["number"] == third["number"]
    assert first["number"] not in closed(folder)
    assert (
        ray.get(pool.call.remote("responses", "forget", "", "3")) is False
    )  # the pool of a frontend keeps the response itself
    wait_until(lambda: closed(folder).get(first["number"]) == 1)


def test_killed_environment_is_rebuilt_with_the_same_state(start: Any, folder: Path) -> None:
    pool = start()
    say(pool, session="a")
    before = say(pool, session="a")
    os.kill(before["process"], signal.SIGKILL)
    after = say(pool, session="a")
    assert after["pages"] == ["page 1", "page 2", "page 3"]
    assert after["process"] != before["process"]


def test_unknown_history_is_replayed_and_then_goes_on(start: Any) -> None:
    pool = start()
    exchanges = (("Begin.", "one"), ("Go on.", "two"))
    context = {"keeps_history": True, "has_earlier_turns": True, "exchanges": exchanges}
    first = say(pool, earlier="a", history="b", **context)
    assert first["pages"] == ["one", "two", "page 3"]
    os.kill(first["process"], signal.SIGKILL)
    second = say(pool, earlier=with_message("b", "assistant", "page 3"), history="c", **context)
    assert second["pages"] == ["one", "two", "page 3", "page 4"] and second["process"] != first["process"]


def test_environment_killed_during_a_message_is_rebuilt(start: Any, slow_files: tuple[Path, Path]) -> None:
    pool, (begun, go_on) = start(), slow_files
    before = say(pool, session="slow")
    slow = pool.play.remote(SLOW, SamplingParams(), RequestContext(session="slow"))
    wait_until(begun.exists)
    os.kill(before["process"], signal.SIGKILL)
    go_on.touch()
    after = told(slow)
    assert after["pages"] == ["page 1", "page 2"] and after["process"] != before["process"]


@pytest.mark.parametrize(
    ("env_class", "why"),
    [(LostNotebookEnv, "its resumes_by is None"), (MoodyNotebookEnv, "cannot be resumed")],
)
def test_killed_environment_that_cannot_be_rebuilt_is_an_error(
    start: Any, env_class: type[BaseEnv], why: str
) -> None:
    pool = start(env_class)
    os.kill(say(pool, session="a")["process"], signal.SIGKILL)
    for _ in range(2):
        error = error_of(lambda: say(pool, session="a"))
        assert (status_of(error), error.code) == (409, "conversation_lost")
        assert why in error.message and "Start a new conversation" in error.message
    ray.get(pool.call.remote("responses", "end_session", "", "a"))
    assert say(pool, session="a")["pages"] == ["page 1"]


def test_environment_without_messages_is_closed_once(start: Any, folder: Path) -> None:
    pool = start(keep_seconds=0.5)
    before = say(pool, session="a")
    wait_until(lambda: closed(folder).get(before["number"]) == 1)
    after = say(pool, session="a")
    assert after["pages"] == ["page 1", "page 2"] and after["number"] != before["number"]


def test_environment_that_has_waited_longest_makes_room(start: Any, folder: Path) -> None:
    pool = start(num_actors=2)
    said: list[dict[str, Any]] = []

    def are_apart() -> bool:
        said[:] = [say(pool, session="old"), say(pool, session="newer")]
        return said[0]["process"] != said[1]["process"]

    wait_until(are_apart)  # both actors are up
    oldest, newer = said
    closed_before = closed(folder)
    assert say(pool, session="newest")["process"] == oldest["process"]
    assert closed(folder) == closed_before | {oldest["number"]: 1}
    assert say(pool, session="newer")["number"] == newer["number"]


def test_there_is_actor_for_each_conversation_within_bounds(start: Any, folder: Path) -> None:
    pool = start(max_actors=3, second_message="wait")
    fleet, numbers = ray.get(pool.__ray_call__.remote(lambda self: self._service._fleet)), {}
    for session, num_actors in (("a", 2), ("b", 3), ("c", 3)):
        numbers[session] = say(pool, session=session)["number"]
        wait_until(lambda count=num_actors: ray.get(fleet.status.remote()).num_ready == count)
    assert not set(numbers.values()) & set(closed(folder)), "each of the three has an actor of its own"
    assert {session: say(pool, session=session)["number"] for session in numbers} == numbers


def test_message_alone_keeps_nothing(start: Any, folder: Path) -> None:
    number = say(start())["number"]
    assert closed(folder)[number] == 1


def test_earlier_answer_can_be_followed_another_way(start: Any) -> None:
    pool = start()
    say(pool, answer_id="first", can_be_followed=True)
    say(pool, after="first", answer_id="second", can_be_followed=True)
    assert say(pool, after="first", answer_id="other", can_be_followed=True)["pages"] == ["page 1", "page 2"]
    assert say(pool, after="second", answer_id="third")["pages"] == ["page 1", "page 2", "page 3"]


def test_second_message_of_a_conversation_is_rejected(start: Any, slow_files: tuple[Path, Path]) -> None:
    pool, (begun, go_on) = start(num_actors=2), slow_files
    say(pool, session="busy")
    slow = pool.play.remote(SLOW, SamplingParams(), RequestContext(session="busy"))
    wait_until(begun.exists)
    assert error_of(lambda: say(pool, session="busy")).code == "conversation_busy"
    go_on.touch()
    assert told(slow)["pages"] == ["page 1", "page 2"]


def test_second_message_of_a_conversation_waits_its_turn(start: Any, slow_files: tuple[Path, Path]) -> None:
    pool, (begun, go_on) = start(max_actors=3, second_message="wait"), slow_files
    say(pool, session="busy")
    slow = pool.play.remote(SLOW, SamplingParams(), RequestContext(session="busy"))
    wait_until(begun.exists)
    second = pool.play.remote("Go on.", SamplingParams(), RequestContext(session="busy"))
    time.sleep(1)  # it comes while the first is under way
    go_on.touch()
    assert told(slow)["pages"] == ["page 1", "page 2"]
    assert told(second)["pages"] == ["page 1", "page 2", "page 3"]


def test_end_of_a_pool_closes_what_it_keeps(start: Any, folder: Path) -> None:
    pool = start(num_actors=2)
    kept = [say(pool, session=name)["number"] for name in ("one", "two")]
    ray.get(pool.end.remote(), timeout=120)
    assert [closed(folder).get(number) for number in kept] == [1, 1]


def test_openai_and_a2a_clients_talk_on_in_the_same_environment(
    serve_port: int, tiny_model: Path, tmp_path: Path
) -> None:
    """Over HTTP, through Serve, sampled from an engine."""
    pair = Pair(agent_class=GameAgent, env_class=LoggedNotebookEnv, env_args={"folder": str(tmp_path)})
    pool = AgentPool.remote(
        pair,
        lambda message: {"question": message},
        partial(ServeSampler, "talk", str(tiny_model)),
        RolloutLimits(),
        FleetConfig(num_actors=1),
    )
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options={"replies": ["Hello."]})
    config = ServerConfig(engine=engine, http_port=serve_port)
    agents = {"agent/notebook": pool}
    app = PolicyApp("talk", ServedModel(path=str(tiny_model)), config, WeightStore.remote(), agents=agents)
    app.start()
    url = f"http://127.0.0.1:{serve_port}"
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model, hi = "agent/notebook", {"role": "user", "content": "Say hi"}

    async def talk_over_a2a() -> str:
        async with connected(url, streaming=False) as (agent, _):
            context = (await only_task(agent, question("Say hi"))).context_id
            again = question("Say hi")
            again.message.context_id = context
            return state(await only_task(agent, again))

    try:
        first = client.responses.create(model=model, input="Say hi")
        client.responses.create(model=model, input=[hi], previous_response_id=first.id)
        for _ in range(2):
            client.chat.completions.create(model=model, messages=[hi], extra_headers={"X-Session-Id": "a"})
        assert asyncio.run(talk_over_a2a()) == "COMPLETED"
    finally:
        app.stop()
    said = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [pages for _, pages in said] == ["1", "2"] * 3
    notebooks = [number for number, _ in said]
    assert notebooks[::2] == notebooks[1::2] and len(set(notebooks)) == 3
    assert {number: closed(tmp_path)[number] for number in notebooks} == dict.fromkeys(notebooks, 1)
