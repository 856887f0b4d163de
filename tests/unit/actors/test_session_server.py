"""Programs elsewhere: they fetch a training's tasks over HTTP, and hand in their rewards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from machine import free_port, wait_until
from ray.util import get_node_ip_address
from shown_programs import PLAY
from test_rollout_function import TASK, echo, play
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from actors.gateway import session_server
from actors.gateway.calls import ProgramCalls
from actors.gateway.entries import SessionJournals
from actors.gateway.function import Program, pair_of
from actors.gateway.remote_program import RemoteProgram
from actors.gateway.server import CALL_HEADER, RETRY_HEADER, Listener, gateway, serve
from actors.gateway.session_server import SessionServer
from actors.gateway.sessions import Sessions, run
from actors.rollouts.pair_process import PairProcess, Zygote
from actors.rollouts.player import NODE_ADDRESS, Attempt
from actors.rollouts.rollout import RolloutLimits, RolloutRequest
from actors.serving.keys import KEYS_VARIABLE
from environments.data.late_rewards import LateRewards
from environments.errors import AgentError, ConfigError, EnvironmentFailure
from environments.types import Completion, Message, TerminationReason, Trajectory
from policies.learning.samples import is_judged, training_samples
from policies.sampler import SampleRequest, ScriptedSampler

KEY = "a-key-of-the-programs"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Sessions]]:
    """Those of all session servers, which run in this process."""
    monkeypatch.setenv(KEYS_VARIABLE, f"programs:{KEY}")
    monkeypatch.setenv(NODE_ADDRESS, get_node_ip_address())
    monkeypatch.chdir(tmp_path)
    gateway.cache_clear()
    listeners: list[Listener] = []
    made: list[Sessions] = []

    def kept(*given: Any) -> Listener:
        listeners.append(serve(*given))
        return listeners[-1]

    def new(*given: Any) -> Sessions:
        made.append(Sessions(*given))
        return made[-1]

    monkeypatch.setattr("actors.gateway.server.serve", kept)
    monkeypatch.setattr("actors.gateway.sessions.Sessions", new)
    monkeypatch.setattr(
        "actors.gateway.session_server.start_process",
        lambda *given: threading.Thread(target=run, args=given, daemon=True).start(),
    )
    yield made
    gateway.cache_clear()
    for listener in listeners:  # else some hundred of them run beside the tests that follow
        listener._server.should_exit = True
    for each in made:
        each.ended.set()


@pytest.fixture
def server(sessions: list[Sessions]) -> SessionServer:
    return SessionServer(port=0, silent_seconds=20)  # a test that fails does not wait for ever


@pytest.fixture
def http(server: SessionServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
def start(server: SessionServer) -> Iterator[Callable[..., Future[Trajectory]]]:
    """Play a rollout of the server in the background."""
    with ThreadPoolExecutor(8) as threads:
        yield lambda **limits: threads.submit(play, server.rollout, **limits)
        server.close()  # a test that has failed waits for no rollout


def claim(http: httpx.Client) -> dict[str, Any]:
    response = http.post("/sessions")
    assert response.status_code == 200
    session: dict[str, Any] = response.json()
    return session


def call(session: dict[str, Any], *contents: str) -> Any:
    """What the policy answers in a session."""
    variables = session["environment"]
    with openai.OpenAI(
        base_url=variables["OPENAI_BASE_URL"],
        api_key=variables["OPENAI_API_KEY"],
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        messages: Any = [{"role": "user", "content": each} for each in contents]
        return client.chat.completions.create(model=session["model"], messages=messages)


def reward(http: httpx.Client, session: dict[str, Any], **result: Any) -> httpx.Response:
    return http.post(f"/sessions/{session['id']}/reward", json=result)


def test_program_elsewhere_plays_a_task_and_judges_it(start: Any, http: httpx.Client) -> None:
    rollout = start()
    session = claim(http)
    assert session["task"] == TASK
    assert "127.0.0.1" not in session["environment"]["OPENAI_BASE_URL"], "nobody else reaches that"
    said = call(session, TASK["question"]).choices[0].message.content
    assert said == f"You said {TASK['question']}"
    assert http.get("/sessions").json() == {"waiting": 0, "played": 1}
    assert reward(http, session, reward=0.5, is_correct=True).status_code == 200

    trajectory = rollout.result(30)
    assert trajectory.termination_reason is TerminationReason.ENV_DONE
    assert (trajectory.reward, trajectory.is_correct, len(trajectory.steps)) == (0.5, True, 1)
    assert len(training_samples(trajectory)) == 1
    assert http.get("/sessions").json() == {"waiting": 0, "played": 0}


def named(server: SessionServer, name: str, header: bool = False) -> openai.OpenAI:
    """A client that has the address of the session server and a key, and nothing else."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY if header else f"{KEY}:{name}",
        default_headers={"x-session-id": name} if header else {},
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    )


QUESTION: Any = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("header", [False, True], ids=["key", "header"])
def test_name_opens_one_session_by_its_first_call(
    start: Any, http: httpx.Client, server: SessionServer, header: bool
) -> None:
    rollout = start()
    with named(server, "run-7", header) as client:
        first = client.chat.completions.create(model="m", messages=QUESTION)
        assert first.choices[0].message.content == "You said a"
        chunks = client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == "You said a"
        assert client.responses.create(model="m", input="b").output_text == "You said b"
        assert [each.id for each in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            client.chat.completions.create(model="m", messages=QUESTION, frequency_penalty=1.0)
        opened = http.post("/sessions", headers={"x-session-id": "run-7"}).json()
        assert opened["task"] == TASK, "the same name gets the same task, as often as it is sent"
        assert http.post("/sessions/run-7/reward", json={"reward": 0.5}).status_code == 200
        trajectory = rollout.result(30)
        assert (trajectory.reward, len(trajectory.steps)) == (0.5, 3)
        waiting = start()  # another task, which the program that has ended does not get
        with pytest.raises(openai.NotFoundError, match="'run-7' has ended: take another name"):
            client.chat.completions.create(model="m", messages=QUESTION)
    reward(http, session := claim(http), error="none")
    assert session["id"] != opened["id"] and waiting.exception(30) is not None


def test_program_elsewhere_plays_its_task_over_a_websocket(
    start: Any, http: httpx.Client, server: SessionServer
) -> None:
    rollout = start()
    with named(server, "run-9") as client, client.responses.connect() as connection:
        before: dict[str, str] = {}
        for text in ("a", "b"):
            connection.response.create(model="m", input=text, store=False, **before)
            (response,) = [each.response for each in _until_completed(connection)]
            assert response.output_text == f"You said {text}"
            before = {"previous_response_id": response.id}
        assert http.post("/sessions/run-9/reward", json={"reward": 0.5}).status_code == 200
    trajectory = rollout.result(30)
    assert (trajectory.reward, len(trajectory.steps)) == (0.5, 2)
    assert len(training_samples(trajectory)) == 1, "the second has what the first has said"
    with named(server, "a/b") as client, pytest.raises(InvalidStatus, match="400"):
        client.responses.connect().enter()


def test_program_that_goes_in_its_handshake_takes_no_task(
    start: Any, http: httpx.Client, server: SessionServer
) -> None:
    address = f"{server.url.replace('http', 'ws', 1)}/v1/responses"
    with pytest.raises(TimeoutError):
        connect(address, additional_headers=HEADERS | {"x-session-id": "a"}, open_timeout=0.5).__enter__()
    time.sleep(0.5)
    rollout = start()
    reward(http, claim(http), error="none")
    assert rollout.exception(30) is not None


def _until_completed(connection: Any) -> Iterator[Any]:
    for event in connection:
        if event.type == "response.completed":
            yield event
            return


def test_conversation_that_goes_on_has_the_length_of_a_whole_one(
    start: Any, http: httpx.Client, server: SessionServer
) -> None:
    """Its first prompt has an answer of an earlier rollout, and is longer than a first one may be."""
    rollout = start(max_prompt_tokens=30, max_response_tokens=1000)
    with named(server, "a") as client:
        messages: Any = [*QUESTION, {"role": "assistant", "content": "b" * 50}, *QUESTION]
        client.chat.completions.create(model="m", messages=messages)
    http.post("/sessions/a/reward", json={"reward": 1})
    assert rollout.result(30).reward == 1.0
    too_long = start(max_prompt_tokens=30)
    with named(server, "b") as client, pytest.raises(openai.BadRequestError, match="rollout"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "c" * 50}])
    http.post("/sessions/b/reward", json={"reward": 1})
    assert "max_prompt_tokens=30" in str(too_long.result(30).error)


def test_name_of_anthropics_client_is_in_its_key(
    start: Any, http: httpx.Client, server: SessionServer
) -> None:
    rollout = start()
    with anthropic.Anthropic(base_url=server.url, api_key=f"{KEY}:one", max_retries=0) as client:
        number = client.messages.count_tokens(model="m", messages=QUESTION).input_tokens
        message = client.messages.create(model="m", max_tokens=9, messages=QUESTION)
        assert message.usage.input_tokens == number
    http.post("/sessions/one/reward", json={"reward": 1})
    assert rollout.result(30).reward == 1.0


def test_calls_of_one_name_at_once_take_one_task(
    start: Any, http: httpx.Client, server: SessionServer
) -> None:
    """Also where they come before any task is there."""
    with named(server, "early") as client, ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(client.chat.completions.create, model="m", messages=QUESTION) for _ in range(4)
        ]
        time.sleep(0.2)
        rollouts = [start() for _ in range(4)]
        assert {each.result(30).choices[0].message.content for each in calls} == {"You said a"}
        wait_until(lambda: http.get("/sessions").json() == {"waiting": 3, "played": 1}, 30)
    http.post("/sessions/early/reward", json={"reward": 1})
    for _ in range(3):
        reward(http, claim(http), error="none")
    ended = [each.exception(30) or each.result() for each in rollouts]
    assert [len(each.steps) for each in ended if isinstance(each, Trajectory)] == [4]


@pytest.mark.slow
def test_name_that_another_request_has_opened_is_found(
    monkeypatch: pytest.MonkeyPatch, start: Any, http: httpx.Client, server: SessionServer
) -> None:
    """Of two that wait for the only task one gets it, and the other one the same session."""
    monkeypatch.setattr("actors.gateway.sessions.ANSWER_SECONDS", 1.0)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(http.post, "/sessions", headers={"x-session-id": "a"}) for _ in range(2)]
        time.sleep(0.2)
        rollout = start()
        assert len({each.result(30).json()["id"] for each in waiting}) == 1
    http.post("/sessions/a/reward", json={"error": "none"})
    assert rollout.exception(30) is not None


@pytest.mark.slow
def test_calls_of_one_name_at_once_need_one_task_only(
    start: Any, http: httpx.Client, server: SessionServer
) -> None:
    with named(server, "early") as client, ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(client.chat.completions.create, model="m", messages=QUESTION) for _ in range(2)
        ]
        time.sleep(0.2)
        rollout = start()
        assert {each.result(5).choices[0].message.content for each in calls} == {"You said a"}
    http.post("/sessions/early/reward", json={"reward": 1})
    assert len(rollout.result(30).steps) == 2


@pytest.mark.slow
def test_call_by_name_that_is_lost_is_played_once(http: httpx.Client, server: SessionServer) -> None:
    def slow(messages: list[Message]) -> str:
        time.sleep(1.0)
        return "at last"

    body = {"model": "m", "messages": QUESTION}
    with ThreadPoolExecutor(1) as threads:
        rollout = threads.submit(play, server.rollout, slow)
        headers = {"x-session-id": "a"}
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=body, headers=headers, timeout=0.5)
        headers[RETRY_HEADER] = "1"  # at once: its server need not have noticed that the first one has gone
        answer = http.post("/v1/chat/completions", json=body, headers=headers).json()
        assert answer["choices"][0]["message"]["content"] == "at last"
        http.post("/sessions/a/reward", json={"reward": 1})
        assert len(rollout.result(30).steps) == 1


@pytest.mark.slow
def test_call_that_waits_at_the_reward_is_answered(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, server: SessionServer
) -> None:
    monkeypatch.setattr("actors.gateway.sessions.CHECK_SECONDS", 0.05)

    def slow(messages: list[Message]) -> str:
        time.sleep(1.0)
        return "at last"

    with named(server, "a") as client, ThreadPoolExecutor(2) as threads:
        rollout = threads.submit(play, server.rollout, slow)
        waiting = threads.submit(client.chat.completions.create, model="m", messages=QUESTION)
        wait_until(lambda: http.get("/sessions").json()["played"] == 1, 30)
        time.sleep(0.2)  # the call reaches the rollout
        http.post("/sessions/a/reward", json={"reward": 1})
        assert waiting.result(30).choices[0].message.content == "at last"
        assert rollout.result(30).reward == 1.0


ADD = SessionJournals.add


class KilledPlaces:
    """Plays a rollout in processes of which the first is killed, at a moment of the second call. The session
    server has once to make room for the journals of others.
    """

    is_followed = False

    def __init__(self, moment: str) -> None:
        self.moment, self.num_sampled, self.was_full = moment, 0, False
        self.process: Any = None

    def kill(self, moment: str) -> bool:
        if self.moment == moment and self.num_sampled >= 2:
            self.moment = ""
            os.kill(self.process._pid, signal.SIGKILL)
            return True
        return False

    def sample(self, request: SampleRequest, deadline: float) -> Completion:
        self.num_sampled += 1
        self.kill("while it is sampled")
        return asyncio.run(ScriptedSampler(echo).sample(request))

    def record_turn(self, *turn: object) -> None:
        raise AssertionError("The session server has it.")

    def add(self, journals: SessionJournals, session: str, *given: Any) -> bool:
        """Keep entries as the session server does, from which the answer goes to the program then."""
        if self.kill("before its answer is kept"):
            return False
        if not self.was_full and self.num_sampled > 2:
            self.was_full = True
            journals._drop_entries(session)
        return ADD(journals, session, *given) and not self.kill("when its answer is kept")

    def play(self, rollout: RemoteProgram) -> tuple[Trajectory, int]:
        """The trajectory, and the number of attempts."""
        pair = pair_of(None, None, rollout, {}, {})
        request = RolloutRequest(rollout_id="000000/0000", group_id="a", task=TASK)
        zygote, name = Zygote(pair), os.urandom(8).hex()
        for number in count(1):
            self.process = PairProcess(zygote, pair, RolloutLimits(timeout_seconds=60, max_steps=9), self)
            attempt = Attempt(request, number, name=name)
            trajectory = self.process.run(attempt).trajectory
            self.process.end()
            if trajectory.termination_reason is not TerminationReason.CRASHED:
                break
        zygote.end()
        return trajectory, number


TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def told(client: openai.OpenAI, places: KilledPlaces) -> list[str]:
    """What a program is answered: a conversation, in its middle a sub-agent with two choices."""
    messages: list[Any] = [{"role": "user", "content": "a"}]
    answers = []
    for content in ("b", "c"):
        response = client.chat.completions.create(
            model="m", messages=messages, tools=[TOOL], n=1 + bool(answers)
        )
        answers += [each.message.content or "" for each in response.choices]
        places.kill("after its answer")
        messages += [response.choices[0].message, {"role": "user", "content": content}]
    answers.append(client.responses.create(model="m", input="of another agent").output_text)
    places.moment = places.moment.replace("another ", "")
    answers.append(client.responses.create(model="m", input="of another agent").output_text)  # sampled anew
    last = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
    return [*answers, "".join(each.choices[0].delta.content or "" for each in last)]


@pytest.mark.slow
def test_program_notices_nothing_of_a_killed_rollout(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, server: SessionServer
) -> None:
    played = []
    sampled_again = {
        "never": 0,
        "while it is sampled": 1,
        "another while it is sampled": 1,
        "before its answer is kept": 2,
        "when its answer is kept": 0,
        "after its answer": 0,
    }
    for moment, num_again in sampled_again.items():
        places = KilledPlaces(moment)
        monkeypatch.setattr(SessionJournals, "add", lambda *given, places=places: places.add(*given))
        with named(server, moment.replace(" ", "-")) as client, ThreadPoolExecutor(1) as threads:
            rollout = threads.submit(places.play, server.rollout)
            answers = told(client, places)
            session = client.api_key.rpartition(":")[2]
            assert http.post(f"/sessions/{session}/reward", json={"reward": 1}).status_code == 200
            trajectory, num_attempts = rollout.result(60)
        assert trajectory.termination_reason is TerminationReason.ENV_DONE, trajectory.error
        assert num_attempts == 1 + (moment != "never")
        assert places.num_sampled == 6 + num_again, "nothing else is sampled again"
        infos = [{**step.info, "session": ""} for step in trajectory.steps]
        trajectory.rollout_id = "a"
        played.append((answers, infos, trajectory.metrics, training_samples(trajectory)))
    assert played[1:] == played[:1] * 5
    assert http.get("/sessions").json() == {"waiting": 0, "played": 0}


def offer(
    server: SessionServer,
    id: str,
    address: str = "http://127.0.0.1:1",
    seconds: float = 0.3,
    run: str = "runs/first",
    attempt: int = 1,
) -> httpx.Response:
    """Offer a task, as the actor of a rollout does, and wait a while for its result."""
    environment = {"OPENAI_API_KEY": "k", "ANTHROPIC_BASE_URL": address}
    return httpx.post(
        f"{server.url}/offers",
        json={
            "id": id,
            "task": TASK,
            "environment": environment,
            "model": "m",
            "run": run,
            "attempt": attempt,
        },
        headers={"authorization": f"Bearer {server.rollout.key}"},
        timeout=seconds,
        trust_env=False,
    )


@pytest.mark.slow
def test_result_that_was_lost_with_its_actor_is_given_again(
    http: httpx.Client, server: SessionServer
) -> None:
    with ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(http.post, "/sessions", headers={"x-session-id": "a"})
        with pytest.raises(httpx.ReadTimeout):
            offer(server, "lost")
        assert claiming.result(30).json()["id"] == "lost"
    with pytest.raises(httpx.ReadTimeout):  # another actor, which is lost too
        offer(server, "lost")
    assert http.post("/sessions/a/reward", json={"reward": 1}).status_code == 200
    assert [offer(server, "lost").json() for _ in range(2)] == [{"reward": 1}] * 2
    assert http.post("/sessions/a/reward", json={"reward": 0}).status_code == 404
    assert http.get("/sessions").json() == {"waiting": 0, "played": 0}


@pytest.mark.slow
def test_program_that_calls_a_lost_node_is_begun_anew(http: httpx.Client, server: SessionServer) -> None:
    with ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(claim, http)
        with pytest.raises(httpx.ReadTimeout):
            offer(server, "lost")
        assert claiming.result(30)["id"] == "lost"
    lost = {"failed": "Its program calls the policy at a node that is lost."}
    assert [offer(server, "lost").json() for _ in range(2)] == [lost] * 2
    assert http.post("/sessions/lost/reward", json={"reward": 1}).status_code == 404


@pytest.mark.slow
def test_task_of_a_lost_actor_is_handed_out_once(http: httpx.Client, server: SessionServer) -> None:
    """The first actor is lost before a program has come: the second one's offer counts, and only that."""
    with pytest.raises(httpx.ReadTimeout):
        offer(server, "a", "http://127.0.0.1:1")
    wait_until(lambda: http.get("/sessions").json()["waiting"] == 0, 30)
    with ThreadPoolExecutor(1) as threads:
        offered = threads.submit(offer, server, "a", "http://127.0.0.1:2", seconds=5.0)
        wait_until(lambda: http.get("/sessions").json()["waiting"] == 1, 30)
        session = claim(http)
        assert session["environment"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:2"
        assert http.get("/sessions").json() == {"waiting": 0, "played": 1}
        reward(http, session, reward=1)
        assert offered.result(30).json() == {"reward": 1}


@pytest.mark.slow
def test_result_outlasts_the_wait_for_another_actor(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, server: SessionServer
) -> None:
    monkeypatch.setattr("actors.gateway.sessions.LOST_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(http.post, "/sessions", headers={"x-session-id": "a"})
        with pytest.raises(httpx.ReadTimeout):
            offer(server, "a")
        assert claiming.result(30).status_code == 200
    assert http.post("/sessions/a/reward", json={"reward": 1}).status_code == 200
    wait_until(lambda: http.get("/sessions").json()["played"] == 0, 30)
    assert offer(server, "a").json() == {"reward": 1}


class Node(socketserver.ThreadingTCPServer):
    """A node that answers calls by a function of their number of tries and their name."""

    daemon_threads = True

    def __init__(self, answer: Callable[[tuple[str, str]], bytes]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.wfile.write(answer((self.headers[RETRY_HEADER], self.headers[CALL_HEADER])))

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.mark.slow
def test_call_that_is_sent_again_has_its_name_and_number(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, server: SessionServer
) -> None:
    """The node ends each connection without an answer."""
    monkeypatch.setattr("actors.gateway.sessions.RESEND_SECONDS", 0.01)
    tries: list[tuple[str, str]] = []

    def lose(sent: tuple[str, str]) -> bytes:
        tries.append(sent)
        return b""

    body, headers = {"model": "m", "messages": QUESTION}, {"x-session-id": "a"}
    with ThreadPoolExecutor(1) as threads, Node(lose) as node:
        offered = threads.submit(offer, server, "a", node.address, seconds=1.5)
        for retry in ("0", "1"):
            sent = len(tries)
            with pytest.raises(httpx.ReadTimeout):
                headers[RETRY_HEADER] = retry
                http.post("/v1/chat/completions", json=body, headers=headers, timeout=0.4)
            assert len(tries) > sent + 2
        assert sorted(number for number, _ in set(tries)) == ["0", "1"], "a name for each, and its own number"
        node.shutdown()
        offered.exception(30)


@pytest.mark.slow
@pytest.mark.parametrize("has_offered", [True, False], ids=["has offered", "is about to offer"])
def test_answer_of_a_node_that_counts_as_lost_is_none(
    http: httpx.Client, server: SessionServer, sessions: list[Sessions], has_offered: bool
) -> None:
    """It has not died, but the fleet has let another one go on: what it answers is in no journal."""
    is_called, is_replaced = threading.Event(), threading.Event()

    def late(sent: tuple[str, str]) -> bytes:
        is_called.set()
        is_replaced.wait(30)
        return answer("old")

    def answer(text: str) -> bytes:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n\r\n"
        return f"{head}{text}".encode()

    body, headers = {"model": "m", "messages": QUESTION}, {"x-session-id": "a"}
    with (
        Node(late) as old,
        Node(lambda sent: answer("new")) as new,
        ThreadPoolExecutor(3) as threads,
    ):
        offers = [threads.submit(offer, server, "a", old.address, seconds=30.0)]
        called = threads.submit(http.post, "/v1/chat/completions", json=body, headers=headers)
        assert is_called.wait(30)
        if not has_offered:
            assert replace(server.rollout, attempt=2).entries("a") == []
            is_replaced.set()
            assert offer(server, "a", old.address).json() == {
                "failed": "Another actor has gone on with its rollout."
            }
            assert not wait([called], 0.5).done
        offers.append(threads.submit(offer, server, "a", new.address, seconds=30.0, attempt=2))
        address = {"OPENAI_API_KEY": "k", "ANTHROPIC_BASE_URL": new.address}
        wait_until(lambda: sessions[0]._open["a"].offer["environment"] == address, 30)
        is_replaced.set()
        assert called.result(30).text == "new"
        http.post("/sessions/a/reward", json={"reward": 1})
        assert [each.result(30).json() for each in offers] == [{"reward": 1}] * 2
        old.shutdown()
        new.shutdown()


def test_call_ends_with_the_rollout_of_a_silent_node(
    monkeypatch: pytest.MonkeyPatch, server: SessionServer
) -> None:
    """The node is lost: it answers no more, and the connection of its offer has ended."""
    monkeypatch.setattr("actors.gateway.sessions.LOST_SECONDS", 0.1)
    monkeypatch.setattr("actors.gateway.sessions.CHECK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as node, ThreadPoolExecutor(1) as threads:
        offered = threads.submit(offer, server, "lost", f"http://127.0.0.1:{node.getsockname()[1]}")
        with named(server, "a") as client, pytest.raises(openai.NotFoundError, match="'a' has ended"):
            client.with_options(timeout=10).chat.completions.create(model="m", messages=QUESTION)
        assert isinstance(offered.exception(5), httpx.ReadTimeout)


def test_name_without_a_task_is_refused_for_a_while(
    monkeypatch: pytest.MonkeyPatch, server: SessionServer
) -> None:
    monkeypatch.setattr("actors.gateway.sessions.ANSWER_SECONDS", 0.1)
    with named(server, "a") as client:
        with pytest.raises(openai.InternalServerError, match="No task waits") as refused:
            client.chat.completions.create(model="m", messages=QUESTION)
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("key", "headers", "status", "text"),
    [
        (KEY, {}, 400, "Name the session"),
        (f"{KEY}:", {}, 400, "Name the session"),
        (f"{KEY}:a/b", {}, 400, "is no name of a session"),
        (KEY, {"x-session-id": "b" * 65}, 400, "is no name of a session"),
        ("another-key-of-somebody:a", {}, 401, KEYS_VARIABLE),
        ("a", {}, 401, KEYS_VARIABLE),
    ],
)
def test_call_without_a_name_or_key_is_refused(
    server: SessionServer, key: str, headers: dict[str, str], status: int, text: str
) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={},
        headers={"authorization": f"Bearer {key}", **headers},
        trust_env=False,
    )
    assert response.status_code == status and text in response.json()["error"]["message"]


def test_names_of_ended_sessions_are_bounded(
    monkeypatch: pytest.MonkeyPatch, start: Any, http: httpx.Client, sessions: list[Sessions]
) -> None:
    monkeypatch.setattr("actors.gateway.sessions.MAX_NAMES", 2)
    others = [start() for _ in range(3)]
    for number in range(3):
        http.post("/sessions", headers={"x-session-id": f"open-{number}"})
    assert len(sessions[0]._named) == 3, "one that is open is never forgotten"
    for number in range(3):
        http.post(f"/sessions/open-{number}/reward", json={"error": "none"})
    assert all(each.exception(30) is not None for each in others)
    for number in range(4):
        rollout = start()
        http.post("/sessions", headers={"x-session-id": f"name-{number}"})
        http.post(f"/sessions/name-{number}/reward", json={"error": "none"})
        assert rollout.exception(30) is not None
    assert [name for _, name in sessions[0]._named] == ["name-1", "name-2", "name-3"]


def test_name_is_that_of_its_key(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs with keys of their own have chosen the same name."""
    keys = {name: f"a-key-of-the-{name}" for name in ("first", "second")}
    monkeypatch.setenv(KEYS_VARIABLE, ",".join(f"{name}:{key}" for name, key in keys.items()))
    server = SessionServer(port=0, silent_seconds=20)
    with ThreadPoolExecutor(2) as threads:
        rollouts = [threads.submit(play, server.rollout) for _ in keys]
        opened = set()
        for name, key in keys.items():
            headers = {"authorization": f"Bearer {key}:run"}
            with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30) as client:
                opened.add(client.post("/sessions").json()["id"])
                client.post("/v1/responses", json={"model": "m", "input": name})
                assert client.post("/sessions/run/reward", json={"reward": 1}).status_code == 200
        assert len(opened) == 2
        words = {each.result(30).steps[0].observation[0]["content"] for each in rollouts}
        assert words == set(keys)


def test_calls_of_a_program_elsewhere_have_rewards_of_their_own(start: Any, http: httpx.Client) -> None:
    rollout = start()
    session = claim(http)
    call(session, "a")
    call(session, "b")
    reward(http, session, rewards=[1, -0.5])
    assert [step.reward for step in rollout.result(30).steps] == [1.0, -0.5]


def test_answer_of_a_program_elsewhere_is_left_out(start: Any, http: httpx.Client) -> None:
    rollout = start()
    session = claim(http)
    call(session, "a")
    call(session, "b")
    reward(http, session, rewards=[None, -0.5])
    (sample,) = training_samples(rollout.result(30))
    assert set(sample.turns) == {1}


@pytest.mark.slow
def test_each_task_goes_to_one_program(start: Any, http: httpx.Client) -> None:
    rollouts = [start() for _ in range(8)]
    with ThreadPoolExecutor(8) as programs:
        sessions = list(programs.map(lambda _: claim(http), range(8)))
    assert len({each["id"] for each in sessions}) == 8
    for number, session in enumerate(sessions):
        call(session, str(number))
        reward(http, session, reward=number)
    played = [each.result(30) for each in rollouts]
    assert sorted(each.reward for each in played) == list(range(8))
    for each in played:  # a session's key opens only its session
        assert each.steps[0].observation == [{"role": "user", "content": f"{each.reward:g}"}]


def test_reward_counts_once(start: Any, http: httpx.Client) -> None:
    rollout = start()
    session = claim(http)
    call(session, "a")
    assert reward(http, session, reward=1).status_code == 200
    again = reward(http, session, reward=0)
    assert again.status_code == 404 and "has its reward already" in again.json()["error"]["message"]
    assert rollout.result(30).reward == 1.0


def test_reward_that_comes_later_is_kept_once(
    start: Any, http: httpx.Client, server: SessionServer, tmp_path: Path
) -> None:
    rollout = start()
    session = http.post("/sessions", headers={"x-session-id": "run-7"}).json()
    call(session, "a")
    call(session, "b")
    assert http.post("/sessions/run-7/reward", json={"later": True}).json()["id"] == session["id"]
    trajectory = rollout.result(30)
    assert trajectory.termination_reason is TerminationReason.JUDGED_LATER
    assert training_samples(trajectory) == [] and not is_judged(trajectory)
    assert [each.info["session"] for each in trajectory.steps] == [session["id"]] * 2
    assert reward(http, session, later=True).status_code == 404

    server.close()
    anew = SessionServer(port=0, silent_seconds=20)  # the one of a resumed run
    with httpx.Client(base_url=anew.url, trust_env=False) as again:
        policy_key, headers = session["environment"]["OPENAI_API_KEY"], {"authorization": f"Bearer {KEY}"}
        unknown = again.post("/sessions/run-7/reward", json={"reward": 0.5}, headers=headers)
        assert unknown.status_code == 404 and "by no name" in unknown.json()["error"]["message"]
        for key, status in ((policy_key, 401), (KEY, 200), (KEY, 404)):
            headers = {"authorization": f"Bearer {key}"}
            answer = again.post(
                f"/sessions/{session['id']}/reward", json={"reward": 0.5, "is_correct": True}, headers=headers
            )
            assert answer.status_code == status
    kept = LateRewards(tmp_path / "late_rewards").read()
    assert kept == {session["id"]: {"reward": 0.5, "is_correct": True}}


DRIVER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from actors.gateway.session_server import SessionServer
from test_rollout_function import play

def answer(messages):
    if len(messages) > 1:
        print("is called\\n", end="", flush=True)  # in one piece, as threads write it
        time.sleep(600)
    return f"You said {messages[-1]['content']}"

rollout = replace(SessionServer(port=int(sys.argv[1])).rollout, run="runs/first")
with ThreadPoolExecutor(8) as threads:
    for number in range(8):
        threads.submit(play, rollout, answer, task={"number": number // 2})
"""


def converse(url: str, name: str, goes_on: threading.Event, begun: list[str]) -> list[str]:
    """What a program that tries nothing again is answered; between two calls it waits for ``goes_on``."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=f"{KEY}:{name}", max_retries=0, timeout=30)
    headers = {"authorization": f"Bearer {KEY}:{name}"}
    with client, httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
        session = claim(http)
        number, answers = session["task"]["number"], []
        messages: list[Any] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{turn} of {number}"})
            answers.append(client.chat.completions.create(model="m", messages=messages).choices[0].message)
            messages.append(answers[-1])
            begun.append(name)
            goes_on.wait(60)
        assert reward(http, session, reward=number).status_code == 200
    assert [each.content for each in answers] == [f"You said {turn} of {number}" for turn in range(3)]
    return answers


FEW_FILES = """
import resource, socket, sys
from actors.gateway import sessions
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))  # a shell's is 1024, mostly
sessions.run = lambda *_: print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))
sys.argv[1:] = [str(socket.create_server(("127.0.0.1", 0)).detach()), "key"]
sessions.main()
"""


@pytest.mark.slow
def test_session_server_opens_as_many_connections_as_it_may() -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FEW_FILES]
    assert subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True).stdout == "True\n"


@pytest.mark.slow
def test_programs_notice_nothing_of_a_killed_driver(sessions: list[Sessions]) -> None:
    """Of eight in mid-conversation, four have a call open when it is killed, and four make one after that. In
    the rollouts of the resumed run the answers before are context, and each answer after is trained once.
    """
    port = free_port()
    url = f"http://{get_node_ip_address()}:{port}"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", DRIVER, str(port)]
    now, later = threading.Event(), threading.Event()
    now.set()
    with (
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as driver,
        ThreadPoolExecutor(16) as threads,
        ExitStack() as end,
    ):
        end.callback(driver.kill)
        wait_until(lambda: connects(url), 60)
        begun: list[str] = []
        programs = [
            threads.submit(converse, url, f"a-{each}", now if each % 2 else later, begun) for each in range(8)
        ]
        assert driver.stdout is not None
        assert [driver.stdout.readline() for _ in range(4)] == ["is called\n"] * 4
        wait_until(lambda: len(begun) == 8, 60)
        driver.kill()
        driver.wait(60)
        later.set()
        time.sleep(0.5)
        assert [each.exception() for each in programs if each.done()] == []
        resumed = SessionServer(port=port, silent_seconds=20)
        end.callback(resumed.close)
        assert sessions == [], "it is the process that the killed driver has started"
        rollout = replace(resumed.rollout, run="runs/first")
        rollouts = [threads.submit(play, rollout, task={"number": number // 2}) for number in (*range(8), 8)]
        assert [len(each.result(60)) for each in programs] == [3] * 8
        played = [each.result(60) for each in rollouts[:-1]]
        with httpx.Client(base_url=url, headers=HEADERS, trust_env=False, timeout=60) as http:
            new = claim(http)
            assert new["task"] == {"number": 4}, "a new name gets a new task"
            reward(http, new, error="none")
        assert rollouts[-1].exception(60) is not None
        resumed.close()
        wait_until(lambda: not connects(url), 60)
    for number, trajectory in enumerate(played):
        assert trajectory.reward == number // 2
        turns = [step.observation[-1]["content"] for step in trajectory.steps]
        assert turns == [f"1 of {number // 2}", f"2 of {number // 2}"]
        assert trajectory.metrics["foreign_answers"] == 2, "the same in both calls"
        (sample,) = training_samples(trajectory)
        assert sample.num_sampled_tokens == sum(len(f"You said {turn}.") for turn in turns)


def test_session_of_a_killed_driver_goes_on_once(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, server: SessionServer
) -> None:
    """A reward that comes before the next driver is of no rollout; the next one is known by both its ids."""
    with ThreadPoolExecutor(4) as threads:
        for name, id in (("a", "first"), ("b", "judged")):
            offered = threads.submit(offer, server, id)
            assert http.post("/sessions", headers={"x-session-id": name}).json()["id"] == id
            assert isinstance(offered.exception(5), httpx.ReadTimeout)
        server._driver.close()  # what the kernel does for a driver that is killed
        wait_until(lambda: http.post("/sessions/b/reward", json={"reward": 1}).status_code == 200, 5)
        monkeypatch.setenv(KEYS_VARIABLE, f"programs:{KEY},others:another-key-of-somebody")
        resumed = SessionServer(port=int(server.url.rpartition(":")[2]))
        others = {"authorization": "Bearer another-key-of-somebody"}
        assert http.get("/sessions", headers=others).status_code == 200, (
            "the keys are those of the new driver"
        )
        assert offer(server, "first").status_code == 401, "a rollout of the driver that has died"
        offers = [threads.submit(offer, resumed, id, seconds=5.0) for id in ("second", "third")]
        wait_until(lambda: http.get("/sessions").json() == {"waiting": 1, "played": 1}, 5)
        ids = {http.post("/sessions", headers={"x-session-id": name}).json()["id"] for name in ("a", "c")}
        assert ids == {"second", "third"}
        assert http.post("/sessions/b/reward", json={"reward": 1}).status_code == 404
        assert http.post("/sessions/first/reward", json={"reward": 0.5}).status_code == 200
        assert http.post("/sessions/c/reward", json={"reward": 0.25}).status_code == 200
        assert sorted(each.result(5).json()["reward"] for each in offers) == [0.25, 0.5]


@pytest.mark.slow
def test_program_that_dies_with_its_driver_fails_its_rollout(
    http: httpx.Client, server: SessionServer, sessions: list[Sessions]
) -> None:
    """It has made no call of the next driver's rollout, whose silence begins there."""
    with ThreadPoolExecutor(3) as threads, named(server, "a") as client:
        for name in ("a", "dies"):
            offered = threads.submit(offer, server, name)
            assert http.post("/sessions", headers={"x-session-id": name}).json()["id"] == name
            assert isinstance(offered.exception(5), httpx.ReadTimeout)
        server._driver.close()
        wait_until(lambda: sessions[0].alone_seconds() > 0, 5)
        calling = threads.submit(client.chat.completions.create, model="m", messages=QUESTION)
        resumed = SessionServer(port=int(server.url.rpartition(":")[2]), silent_seconds=0.5)
        calls = threads.submit(offer, resumed, "second", seconds=2.0)
        wait_until(lambda: "second" in sessions[0]._open, 5)
        failure = offer(resumed, "third", seconds=5.0).json()
        assert "has made no call for 0.5 s since, and has sent no reward" in failure["failed"]
        assert offer(resumed, "third").json() == failure, "it is nobody else's task"
        assert isinstance(calls.exception(5), httpx.ReadTimeout), "the node of its call does not answer"
        resumed.close()
        assert calling.exception(5) is not None


@pytest.mark.slow
def test_program_that_dies_with_its_actor_fails_its_rollout(sessions: list[Sessions]) -> None:
    """As on a node that is lost with both: the next actor has no answer from which it counts the silence."""
    server = SessionServer(port=0, silent_seconds=0.5)
    headers = {**HEADERS, "x-session-id": "a"}
    with ThreadPoolExecutor(1) as threads:
        offered = threads.submit(offer, server, "a")
        assert httpx.post(f"{server.url}/sessions", headers=headers, trust_env=False).json()["id"] == "a"
        assert isinstance(offered.exception(5), httpx.ReadTimeout)
        failure = offer(server, "a", seconds=5.0, attempt=2).json()
    assert "has made no call for 0.5 s since, and has sent no reward" in failure["failed"]


@pytest.mark.slow
def test_list_of_models_is_no_sign_of_a_program(http: httpx.Client, sessions: list[Sessions]) -> None:
    """A check of its health may outlive the program: the silence goes on."""
    server = SessionServer(port=0, silent_seconds=1.0)
    headers = {**HEADERS, "x-session-id": "a"}
    with (
        httpx.Client(base_url=server.url, headers=headers, trust_env=False) as http,
        ThreadPoolExecutor(1) as threads,
    ):
        offered = threads.submit(offer, server, "a")
        assert http.post("/sessions").json()["id"] == "a"
        assert isinstance(offered.exception(5), httpx.ReadTimeout)
        offered = threads.submit(offer, server, "a", seconds=5.0, attempt=2)
        wait_until(lambda: not sessions[-1]._open["a"].has_called, 5)
        with pytest.raises(httpx.ReadTimeout):
            http.get("/v1/models", timeout=0.3)
        assert "has made no call for 1 s since" in offered.result().json()["failed"]


@pytest.mark.parametrize(("before", "after"), [("runs/first", "runs/second"), ("", "")])
def test_session_of_a_killed_driver_goes_on_in_its_run_only(
    http: httpx.Client, server: SessionServer, sessions: list[Sessions], before: str, after: str
) -> None:
    """Another training at the same port has the same task; of an evaluation nothing goes on."""
    with ThreadPoolExecutor(1) as threads:
        offered = threads.submit(offer, server, "first", run=before)
        claimed = http.post("/sessions", headers={"x-session-id": "a"}).json()
        assert claimed["id"] == "first" and "run" not in claimed, "programs need not know its folder"
        assert isinstance(offered.exception(5), httpx.ReadTimeout)
        server._driver.close()
        wait_until(lambda: sessions[0].alone_seconds() > 0, 5)
        other = SessionServer(port=int(server.url.rpartition(":")[2]))
        offered = threads.submit(offer, other, "second", seconds=1.0, run=after)
        wait_until(lambda: http.get("/sessions").json()["waiting"] == 1, 5)
        assert isinstance(offered.exception(5), httpx.ReadTimeout)


def test_call_whose_driver_never_comes_back_ends(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, server: SessionServer
) -> None:
    monkeypatch.setattr("actors.gateway.sessions.DRIVER_SECONDS", 0.5)
    monkeypatch.setattr("actors.gateway.sessions.CHECK_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as threads, named(server, "a") as client:
        offered = threads.submit(offer, server, "lost")
        http.post("/sessions", headers={"x-session-id": "a"})
        assert isinstance(offered.exception(5), httpx.ReadTimeout)
        server._driver.close()
        time.sleep(0.1)
        with pytest.raises(openai.APIStatusError, match="was not resumed within") as ended:
            client.chat.completions.create(model="m", messages=QUESTION)
        assert ended.value.status_code == 410
    wait_until(lambda: not connects(server.url), 10)


def connects(url: str) -> bool:
    """Whether a server listens there."""
    try:
        return bool(httpx.get(url, trust_env=False))
    except httpx.TransportError:
        return False


def test_late_reward_of_no_session_is_refused(http: httpx.Client, tmp_path: Path) -> None:
    for name in ("never-there", "..%2F..%2Fsecret"):
        assert http.post(f"/sessions/{name}/reward", json={"reward": 1}).status_code == 404
    assert not (tmp_path / "late_rewards").exists()


def test_failure_of_a_program_elsewhere_fails_its_rollout(start: Any, http: httpx.Client) -> None:
    rollout = start()
    session = claim(http)
    call(session, "a")
    reward(http, session, error="my tool is broken")
    with pytest.raises(AgentError, match="my tool is broken"):
        rollout.result(30)


def test_limit_ends_a_session_and_its_reward_still_counts(start: Any, http: httpx.Client) -> None:
    rollout = start(max_steps=1)
    session = claim(http)
    call(session, "a")
    with pytest.raises(openai.BadRequestError, match="a limit of the rollout has ended it"):
        call(session, "a", "b")
    reward(http, session, reward=0.25)
    trajectory = rollout.result(30)
    assert (trajectory.termination_reason, trajectory.reward) == (TerminationReason.MAX_STEPS, 0.25)
    assert reward(http, session, reward=1).status_code == 404
    with pytest.raises(openai.AuthenticationError):
        call(session, "a")


@pytest.mark.slow
def test_tasks_wait_while_programs_are_busy(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Sessions]
) -> None:
    """One program plays all: the others wait longer than a task does where nobody asks. The server's clock
    stands still, so that the program has asked in time also on a busy machine.
    """
    monkeypatch.setattr("actors.gateway.sessions.time", SimpleNamespace(monotonic=lambda: 0.0))
    server = SessionServer(port=0, claim_seconds=0.1)
    with (
        ThreadPoolExecutor(4) as threads,
        httpx.Client(base_url=server.url, headers=HEADERS, trust_env=False) as http,
    ):
        rollouts = [threads.submit(play, server.rollout) for _ in range(4)]
        for _ in rollouts:
            session = claim(http)
            call(session, "a")
            time.sleep(0.2)
            reward(http, session, reward=1)
        assert [each.result(30).reward for each in rollouts] == [1.0] * 4


@pytest.mark.slow
def test_program_of_the_page_ends_with_the_training(start: Any, server: SessionServer) -> None:
    variables = {**os.environ, "SESSIONS_URL": server.url, "SESSIONS_KEY": KEY, "NO_PROXY": "*"}
    rollout = start(task={**TASK, "ground_truth": "sure"})
    with subprocess.Popen([sys.executable, "-c", PLAY], env=variables) as program:
        assert rollout.result(60).reward == 1.0
        server.close()
        assert program.wait(30) == 0


def test_task_that_nobody_takes_fails_and_is_handed_out_no_more(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client
) -> None:
    monkeypatch.setattr("actors.gateway.sessions.ANSWER_SECONDS", 0.1)
    server = SessionServer(port=0, claim_seconds=0.1)
    with pytest.raises(
        EnvironmentFailure, match=f"for 0.1 s: start some that send POST {server.url}/sessions"
    ):
        play(server.rollout)
    assert http.post(f"{server.url}/sessions").status_code == 204


def test_program_that_goes_before_its_task_comes_takes_none(
    start: Any, server: SessionServer, http: httpx.Client
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/sessions", headers=HEADERS, timeout=0.2, trust_env=False)
    rollout = start()
    session = claim(http)
    call(session, "a")
    reward(http, session, reward=1)
    assert rollout.result(30).reward == 1.0


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"reward": "1"},
        {"reward": float("nan")},
        {"rewards": 1},
        {"rewards": [None]},
        {"reward": None},
        {"reward": 1, "rewards": [1]},
        {"reward": 1, "is_correct": "yes"},
        {"reward": 1, "is_correct": 1},
        {"reward": True},
        {"reward": 10**400},
        {"rewards": [1e16]},
        {"rewards": []},
        {"reward": 1, "metadata": {}},
        {"error": 3},
        {"later": False},
        {"later": True, "reward": 1},
    ],
    ids=repr,
)
def test_result_in_another_form_is_a_bad_request(http: httpx.Client, result: dict[str, Any]) -> None:
    response = http.post("/sessions/any/reward", content=json.dumps(result))
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and 'Send {"reward": NUMBER}' in message and "1e+15" in message


@pytest.mark.parametrize("key", ["", "another-key-of-somebody", "schlüssel"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/sessions"), ("GET", "/sessions"), ("POST", "/sessions/a/reward")]
)
def test_strangers_get_no_task(server: SessionServer, method: str, path: str, key: str) -> None:
    headers = {"authorization": f"Bearer {key}".encode()} if key else {}
    response = httpx.request(method, server.url + path, headers=headers, trust_env=False)
    assert response.status_code == 401 and KEYS_VARIABLE in response.json()["error"]["message"]


def test_key_of_the_programs_offers_no_task(http: httpx.Client) -> None:
    assert http.post("/offers", json={"task": {}}).status_code == 401


def test_session_server_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"set {KEYS_VARIABLE}=name:key"):
        SessionServer(port=0)


def test_port_in_use_is_named_with_another_one(server: SessionServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"at port {port} of .* such as {port + 1}"):
        SessionServer(port)
    with pytest.raises(ConfigError, match=r"at port 70000 of .* such as 65535"):
        SessionServer(70000)


def test_driver_that_finds_the_key_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch, server: SessionServer
) -> None:
    """It calls before the first one's server has started, and is still not its driver."""
    start = session_server.start_process
    with ThreadPoolExecutor(1) as threads:
        others = []

        def start_late(listening: socket.socket, key_file: Path) -> None:
            others.append(threads.submit(SessionServer, listening.getsockname()[1]))
            time.sleep(0.3)
            start(listening, key_file)

        monkeypatch.setattr("actors.gateway.session_server.start_process", start_late)
        first = SessionServer(port=0)
        assert isinstance(others[0].exception(30), ConfigError)
        with pytest.raises(httpx.ReadTimeout):
            offer(first, "a")


def test_port_of_a_server_that_has_ended_is_free(server: SessionServer) -> None:
    server.close()
    SessionServer(int(server.url.rpartition(":")[2])).close()


def test_key_that_cannot_be_left_is_named(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Sessions], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cannot leave its key in .*none.*: set TMPDIR"):
        SessionServer(port=0)
    assert sessions == []


@pytest.mark.slow
def test_program_that_dies_fails_its_rollout(monkeypatch: pytest.MonkeyPatch, http: httpx.Client) -> None:
    """Its task is not judged: the fleet plays it again."""
    monkeypatch.setattr("actors.gateway.remote_program.SILENCE_CHECK_SECONDS", 0.05)
    server = SessionServer(port=0, silent_seconds=0.5)
    with ThreadPoolExecutor(1) as threads, closing(server):
        rollout = threads.submit(play, server.rollout)
        session = http.post(f"{server.url}/sessions").json()
        call(session, "a")
        with pytest.raises(EnvironmentFailure, match=r"no call for 0\.5 s, and has sent no reward"):
            rollout.result(30)
        wait_until(lambda: http.get(f"{server.url}/sessions").json() == {"waiting": 0, "played": 0}, 30)
        path = f"{server.url}/sessions/{session['id']}/reward"
        assert http.post(path, json={"reward": 1}).status_code == 404
        ended = offer(server, session["id"]).json()["failed"]
        assert "has ended before" in ended, "it is nobody else's task"


@pytest.mark.slow
def test_program_that_waits_for_the_policy_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client
) -> None:
    monkeypatch.setattr("actors.gateway.remote_program.SILENCE_CHECK_SECONDS", 0.05)
    server = SessionServer(port=0, silent_seconds=0.5)

    def slow(messages: list[Message]) -> str:
        time.sleep(1.5)
        return "at last"

    with ThreadPoolExecutor(1) as threads:
        rollout = threads.submit(play, server.rollout, slow)
        session = http.post(f"{server.url}/sessions").json()
        assert call(session, "a").choices[0].message.content == "at last"
        http.post(f"{server.url}/sessions/{session['id']}/reward", json={"reward": 1})
        assert rollout.result(30).reward == 1.0


def test_end_of_a_rollout_withdraws_a_task_that_waits(http: httpx.Client, server: SessionServer) -> None:
    program = Program(server.rollout, TASK, ProgramCalls(), "")
    wait_until(lambda: http.get("/sessions").json() == {"waiting": 1, "played": 0}, 30)
    started = time.monotonic()
    program.end()
    assert time.monotonic() - started < 10
    assert http.get("/sessions").json() == {"waiting": 0, "played": 0}


def test_task_that_json_cannot_hold_fails_its_rollout(server: SessionServer) -> None:
    with pytest.raises(AgentError, match="not JSON compliant"):
        play(server.rollout, task={"limit": float("inf")})


def test_offer_that_the_server_refuses_fails_its_rollout(server: SessionServer) -> None:
    with pytest.raises(EnvironmentFailure, match=r"status 401: .*offer tasks"):
        play(replace(server.rollout, key="of another training"))


def test_offer_whose_server_ends_fails_its_rollout() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with ThreadPoolExecutor(1) as threads, listening:
        rollout = threads.submit(play, RemoteProgram(url, "a key", silent_seconds=300))
        connection, _ = listening.accept()
        connection.recv(1024)
        listening.close()
        connection.close()
        with pytest.raises(EnvironmentFailure, match=f"{url} cannot be reached"):
            rollout.result(30)


def test_server_that_is_gone_fails_the_rollout_by_its_address() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"http://127\.0\.0\.1:1 cannot be reached from this node"
    ) as failure:
        play(RemoteProgram("http://127.0.0.1:1", "secret-of-offers", silent_seconds=300))
    assert "secret-of-offers" not in str(failure.value)
