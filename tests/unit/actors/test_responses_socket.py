"""Responses over a websocket: each frame is answered as the same POST, and a connection has a memory."""

from __future__ import annotations

import itertools
import json
import re
import socket as socketlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent_server import ALICE, BOB, KEYS, listening
from machine import wait_until
from ray import serve
from scripted_engine import ScriptedEngine
from starlette.testclient import WebSocketDenialResponse, WebSocketTestSession
from test_policy_http import serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from actors.serving import responses_socket
from actors.serving.access import Access
from actors.serving.keys import ApiKeys
from actors.settings import AccessConfig, RecordingConfig, ServerConfig
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.limits import MAX_BODY_BYTES

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

Json = dict[str, Any]
QUESTION = "What is 12+34?"
JSON = {"content-type": "application/json"}
ENDS = ("response.completed", "response.incomplete", "error")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Socket:
    """A connection that sends bodies as frames, and takes the events of each answer in."""

    def __init__(self, session: WebSocketTestSession) -> None:
        self.session = session

    def send(self, given: Any = QUESTION, **fields: Any) -> None:
        frame = {"type": "response.create", "model": "tiny", "input": given, **fields}
        self.session.send_text(json.dumps({name: each for name, each in frame.items() if each is not ...}))

    def events(self) -> list[Json]:
        events = [self.session.receive_json()]
        while events[-1]["type"] not in ENDS:
            events.append(self.session.receive_json())
        return events

    def ask(self, given: Any = QUESTION, **fields: Any) -> Json:
        """The response to a frame, or the error."""
        self.send(given, **fields)
        last = self.events()[-1]
        return last if last["type"] == "error" else last["response"]


@contextmanager
def socket_of(
    client: TestClient, headers: dict[str, str] | None = None, path: str = "/v1/responses"
) -> Iterator[Socket]:
    with client.websocket_connect(path, headers={"host": "localhost", **(headers or {})}) as session:
        yield Socket(session)


@pytest.fixture(scope="module")
def client(tokenizer_folder: Path) -> Iterator[TestClient]:
    with serving(tokenizer_folder, max_model_tokens=4000) as client:
        yield client


@pytest.fixture
def socket(client: TestClient) -> Iterator[Socket]:
    with socket_of(client) as socket:
        yield socket


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The prompts of all that is sampled."""
    seen: list[tuple[int, ...]] = []
    stream = ScriptedEngine.stream

    def sample(engine: ScriptedEngine, prompt_ids: tuple[int, ...], *given: Any) -> Any:
        seen.append(tuple(prompt_ids))
        return stream(engine, prompt_ids, *given)

    monkeypatch.setattr(ScriptedEngine, "stream", sample)
    return seen


def shape(event: Json) -> Json:
    """An event without what is another one in each response."""
    return json.loads(re.sub(r'(?<=": ")(resp|msg)_\w+|(?<=_at": )\d+', "0", json.dumps(event)))


def test_frame_gets_the_events_of_the_stream(client: TestClient, socket: Socket) -> None:
    body = {"model": "tiny", "input": QUESTION, "stream": True}
    text = client.post("/v1/responses", json=body).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    socket.send()
    assert [shape(each) for each in socket.events()] == [shape(json.loads(line)) for line in lines]


def test_frames_are_answered_one_after_the_other(socket: Socket) -> None:
    for budget in (1, 2, 3):
        socket.send(max_output_tokens=budget)
    answers = [socket.events() for _ in range(3)]
    assert [events[-1]["response"]["max_output_tokens"] for events in answers] == [1, 2, 3]
    for events in answers:
        assert len({each["response"]["id"] for each in events if "response" in each}) == 1


@pytest.mark.parametrize(
    ("frame", "status", "code", "param"),
    [
        ("{", 400, "invalid_request_error", None),
        ("[]", 400, "invalid_request_error", "type"),
        ('{"type": "response.cancel"}', 400, "invalid_request_error", "type"),
        ({"stream": False}, 400, "invalid_request_error", "stream"),
        ({"background": True}, 400, "invalid_request_error", "background"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"input": ...}, 400, "invalid_request_error", "input"),
        ({"input": 5}, 400, "invalid_request_error", "input"),
        ({"max_output_tokens": 10**6}, 400, "context_length_exceeded", "max_output_tokens"),
        ({"input": "1" * (MAX_BODY_BYTES + 1)}, 413, "invalid_request_error", None),
    ],
)
def test_error_is_a_frame_and_the_connection_stays(
    socket: Socket, frame: str | Json, status: int, code: str, param: str | None
) -> None:
    if isinstance(frame, str):
        socket.session.send_text(frame)
        error = socket.session.receive_json()
    else:
        error = socket.ask(frame.pop("input", QUESTION), **frame)
    assert (error["type"], error["status"]) == ("error", status)
    assert (error["error"]["code"], error["error"]["param"]) == (code, param)
    assert error["error"]["message"] and error["error"]["type"] == "invalid_request_error"
    assert socket.ask()["status"] == "completed"


def test_frames_of_sdks_say_that_they_stream(socket: Socket) -> None:
    """OpenAI's Agents SDK and Codex send the field with all frames."""
    assert socket.ask(stream=True)["status"] == "completed"
    socket.session.send_bytes(json.dumps({"type": "response.create", "model": "tiny", "input": "1"}).encode())
    assert socket.events()[-1]["type"] == "response.completed"


def test_connection_goes_on_from_its_newest_response(
    client: TestClient, socket: Socket, prompts: list[tuple[int, ...]]
) -> None:
    first = socket.ask(store=False)
    second = socket.ask("And then?", store=False, previous_response_id=first["id"])
    third = socket.ask([{"role": "user", "content": "So?"}], store=False, previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    said = {"role": "assistant", "content": "111"}
    asked = [{"role": "user", "content": each} for each in (QUESTION, "And then?", "So?")]
    whole = [asked[0], said, asked[1], said, asked[2]]
    client.post("/v1/responses", json={"model": "tiny", "input": whole})
    assert prompts[2] == prompts[3]
    for gone in (first["id"], "resp_none"):
        error = socket.ask(store=False, previous_response_id=gone)
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
    assert client.get(f"/v1/responses/{third['id']}").status_code == 404
    over_http = {"model": "tiny", "input": "1", "previous_response_id": third["id"]}
    assert client.post("/v1/responses", json=over_http).status_code == 400


def test_other_connection_does_not_know_the_response(client: TestClient, socket: Socket) -> None:
    first = socket.ask(store=False)
    with socket_of(client) as other:
        error = other.ask(store=False, previous_response_id=first["id"])
        assert error["error"]["code"] == "previous_response_not_found"
        assert error["error"]["param"] == "previous_response_id"
        assert other.ask(store=False)["status"] == "completed"


def test_failed_continuation_forgets_its_response(socket: Socket) -> None:
    result = [{"type": "function_call_output", "call_id": "call_none", "output": "46"}]
    first = socket.ask(store=False)
    assert "call_none" in socket.ask(result, previous_response_id=first["id"])["error"]["message"]
    error = socket.ask(store=False, previous_response_id=first["id"])
    assert error["error"]["code"] == "previous_response_not_found"


def test_failure_elsewhere_leaves_the_newest_response(socket: Socket) -> None:
    first = socket.ask(store=False)
    assert socket.ask(model="other", store=False)["status"] == 404
    assert socket.ask(store=False, previous_response_id=first["id"])["status"] == "completed"


def test_stored_responses_work_as_over_http(
    client: TestClient, socket: Socket, prompts: list[tuple[int, ...]]
) -> None:
    first = socket.ask()
    assert client.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
    with socket_of(client) as other:
        own = other.ask("And then?", store=False, previous_response_id=first["id"])
        last = other.ask("So?", previous_response_id=own["id"])
    assert (own["previous_response_id"], last["previous_response_id"]) == (first["id"], own["id"])
    body = {"model": "tiny", "input": "Why?", "previous_response_id": last["id"]}
    assert client.post("/v1/responses", json=body).status_code == 200
    assert all(len(before) < len(prompt) for before, prompt in itertools.pairwise(prompts))


def test_frame_without_an_answer_prepares_the_next(
    client: TestClient, socket: Socket, prompts: list[tuple[int, ...]]
) -> None:
    socket.send(store=False, generate=False)
    events = socket.events()
    assert [each["type"] for each in events] == [
        *("response.created", "response.in_progress", "response.completed")
    ]
    ready = events[-1]["response"]
    assert (ready["output"], ready["usage"]["total_tokens"], prompts) == ([], 0, [])
    answer = socket.ask(..., store=False, previous_response_id=ready["id"])
    assert answer["status"] == "completed"
    client.post("/v1/responses", json={"model": "tiny", "input": QUESTION})
    assert prompts[0] == prompts[1]
    alone = socket.ask(..., generate=False, instructions="Be brief.")
    assert socket.ask(previous_response_id=alone["id"])["status"] == "completed"
    for fields, code in (
        ({"model": "other"}, "model_not_found"),
        ({"previous_response_id": "x"}, "previous"),
    ):
        assert socket.ask(generate=False, **fields)["error"]["code"].startswith(code)
    whole = client.post("/v1/responses", json={"model": "tiny", "input": "1", "generate": False}).json()
    assert (whole["status"], whole["output"]) == ("completed", [])


def test_stranger_is_refused_at_the_handshake(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, keys=KEYS) as client:
        for headers, status in (
            ({}, 401),
            (bearer("none"), 401),
            ({**bearer(ALICE), "host": "evil.example"}, 403),
            ({**bearer(ALICE), "origin": "https://evil.example"}, 403),
        ):
            with pytest.raises(WebSocketDenialResponse) as caught, socket_of(client, headers):
                pass
            assert (caught.value.status_code, "error" in caught.value.json()) == (status, True)
        with socket_of(client, bearer(ALICE)) as socket:
            assert socket.ask()["status"] == "completed"
        with (
            pytest.raises(WebSocketDenialResponse) as caught,
            client.websocket_connect("/v1/other", headers={"host": "localhost"}),
        ):
            pass
        assert caught.value.status_code == 401
        with listening(client) as url:
            address = f"{url.replace('http', 'ws', 1)}/v1/responses"
            with pytest.raises(InvalidStatus, match="401"), connect(address):
                pass
            with connect(address, additional_headers=bearer(BOB)) as bob:
                bob.send('{"type": "response.create", "model": "tiny", "input": "1"}')
                assert json.loads(bob.recv())["type"] == "response.created"


def test_other_address_has_no_websocket(client: TestClient) -> None:
    with pytest.raises(WebSocketDenialResponse) as caught, socket_of(client, path="/v1/chat/completions"):
        pass
    assert caught.value.status_code == 404


def access_of(**settings: Any) -> Access:
    """Access of the server that is up, with other limits from now on."""
    replica = serve.get_replica_context().servable_object
    replica.access = Access(KEYS, ServerConfig(access=AccessConfig(**settings)))
    return replica.access


def test_each_frame_counts_as_a_request(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, keys=KEYS) as client:
        access_of(per_minute={"requests": 4})
        with socket_of(client, bearer(ALICE)) as socket:
            answers = [socket.ask(), socket.ask(), socket.ask(model="other"), socket.ask()]
            assert answers[-1]["status"] == 429
            assert answers[-1]["error"]["code"] == "rate_limit_exceeded"
            with socket_of(client, bearer(BOB)) as bob:
                assert bob.ask()["status"] == "completed"
        text = client.get("/metrics", headers=bearer(BOB)).text
        used = sum(each["usage"]["total_tokens"] for each in answers[:2])
        tokens = re.search(r'http_tokens_total\{key="alice",model="tiny"} (.*)', text)
        assert tokens is not None and float(tokens[1]) == used
        counts = dict(
            re.findall(r'requests_total{key="alice",route="/v1/responses",status="(\d+)"} (.*)', text)
        )
        assert {status: float(number) for status, number in counts.items()} == {"200": 2, "404": 1}
        assert "troupe_http_open_requests 1.0" in text


def test_key_that_is_taken_away_opens_no_further_frame(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, keys=KEYS) as client:
        access = access_of()
        with socket_of(client, bearer(ALICE)) as socket:
            assert socket.ask()["status"] == "completed"
            access._use(ApiKeys({"bob": KEYS.digests["bob"]}))
            error = socket.ask()
            assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")
            socket.session.send_text("{")
            assert socket.session.receive_json()["status"] == 401


def test_frame_is_read_when_its_client_is_let_in(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is counted, and one that is too large costs nothing."""
    with serving(tokenizer_folder, keys=KEYS) as client:
        access_of(per_minute={"requests": 4})
        with socket_of(client, bearer(ALICE)) as socket:
            with monkeypatch.context() as patch:
                patch.setattr(responses_socket, "_body_of", lambda _: 1 / 0)
                assert socket.ask("1" * MAX_BODY_BYTES)["status"] == 413
            for status in (400, 400, 429):
                socket.session.send_text("{")
                assert socket.session.receive_json()["status"] == status


def test_frame_is_as_large_as_its_text(client: TestClient, socket: Socket) -> None:
    """Not as its escapes, of six characters for each of one or three bytes; a half pair stays."""
    text = "\u4e00" * (MAX_BODY_BYTES // 4)
    frame = {"type": "response.create", "model": "tiny", "input": text}
    socket.session.send_text(json.dumps(frame, ensure_ascii=False))
    error = socket.session.receive_json()
    assert (error["status"], error["error"]["code"]) == (400, "context_length_exceeded"), error["error"]
    assert (
        socket.ask("\ud800")["error"]["message"]
        == client.post(
            "/v1/responses", content=json.dumps({"model": "tiny", "input": "\ud800"}), headers=JSON
        ).json()["error"]["message"]
    )


def test_frame_that_takes_too_long_is_ended(tokenizer_folder: Path) -> None:
    long = {"replies": ["1" * 10_000], "max_model_tokens": 10_100}
    with serving(tokenizer_folder, keys=KEYS, **long) as client:
        access_of(max_request_seconds=0.2)
        with socket_of(client, bearer(ALICE)) as socket:
            error = socket.ask(store=False)
            assert (error["status"], error["error"]["code"]) == (500, "request_timeout")


def test_engine_that_fails_in_an_answer_ends_it_by_an_error(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, fails_at=2) as client, socket_of(client) as socket:
        socket.send()
        *begun, error = socket.events()
        assert begun[0]["type"] == "response.created"
        assert (error["status"], error["error"]["code"]) == (500, "server_error")
        assert "script has failed" in error["error"]["message"]


def test_unexpected_error_is_a_frame(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_of(client) as socket:
        with monkeypatch.context() as patch:
            patch.setattr(OpenAIFrontend, "chat", lambda *_: 1 / 0)
            error = socket.ask()
        assert (error["status"], error["error"]["message"]) == (500, "division by zero")
        assert socket.ask()["status"] == "completed"


@pytest.mark.parametrize(
    ("num_frames", "seconds_per_token"), [(1, 0.002), (4, 0.002), (1, 100)], ids=["one", "several", "silent"]
)
def test_client_that_goes_ends_the_sampling(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, num_frames: int, seconds_per_token: float
) -> None:
    """By a server of its own: uvicorn's ``send`` raises then. Frames that wait are not answered."""
    slow = {"replies": ["1" * 20_000], "max_model_tokens": 20_100, "seconds_per_token": seconds_per_token}
    with serving(tokenizer_folder, **slow) as client, listening(client) as url:
        engine = serve.get_replica_context().servable_object._engine
        with connect(f"{url.replace('http', 'ws', 1)}/v1/responses") as opened:
            for _ in range(num_frames):
                opened.send('{"type": "response.create", "model": "tiny", "input": "1"}')
            wait_until(lambda: engine.num_running == 1, seconds=20)
            if seconds_per_token < 1:
                opened.recv()
            opened.socket.shutdown(socketlib.SHUT_RDWR)
        wait_until(lambda: not engine.num_running, seconds=20)
        assert engine.num_started == 1
    assert "Traceback" not in caplog.text


def test_client_whose_frames_pile_up_is_cut_off(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_socket, "MAX_WAITING", 500)
    slow = {"replies": ["1" * 20_000], "max_model_tokens": 20_100, "seconds_per_token": 0.01}
    with serving(tokenizer_folder, **slow) as client, socket_of(client) as socket:
        engine = serve.get_replica_context().servable_object._engine
        socket.send("1" * 300)
        wait_until(lambda: engine.num_running == 1, seconds=20)
        for _ in range(2):
            socket.send("1" * 300)
        while (message := socket.session.receive())["type"] == "websocket.send":
            pass
        assert (message["type"], message["code"]) == ("websocket.close", 1009)
        assert (engine.num_running, engine.num_started) == (0, 1)


def test_connection_ends_after_its_time(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_socket, "CONNECTION_SECONDS", 0.5)
    with socket_of(client) as socket:
        assert socket.ask()["status"] == "completed"
        error = socket.session.receive_json()
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert socket.session.receive() == {"type": "websocket.close", "code": 1000}


def test_connections_have_a_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_socket, "MAX_CONNECTIONS", 1)
    with socket_of(client) as socket:
        with pytest.raises(WebSocketDenialResponse) as caught, socket_of(client):
            pass
        assert (caught.value.status_code, caught.value.headers["retry-after"]) == (503, "1")
        assert socket.ask()["status"] == "completed"
    with socket_of(client) as socket:
        assert socket.ask()["status"] == "completed"


def test_frames_are_recorded_with_what_they_follow(tokenizer_folder: Path, tmp_path: Path) -> None:
    recording = RecordingConfig(folder=str(tmp_path))
    with serving(tokenizer_folder, max_model_tokens=4000, recording=recording) as client:
        with socket_of(client) as socket:
            first = socket.ask(store=False)
            second = socket.ask(store=False, previous_response_id=first["id"])
            assert (first["recorded"], second["recorded"]) == (True, True)
            path = f"/v1/responses/{first['id']}/recording"
            assert set(client.delete(path).json()["deleted"]) == {first["id"], second["id"]}
            third = socket.ask(store=False, previous_response_id=second["id"])
            assert third["recorded"] is False
        with socket_of(client, {"x-troupe-record": "no"}) as socket:
            assert socket.ask()["recorded"] is False
