"""The policy server's HTTP face, without Ray: a fake replica stands where Serve puts the real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ray import serve
from starlette.requests import ClientDisconnect

from actors.serving.policy_server import _respond, http
from environments.errors import SamplerError
from policies.chat import ChatRenderer
from policies.openai.frontend import OpenAIFrontend
from policies.openai.protocol import ChatRequest
from policies.sampler import SamplingParams, TokenOutput
from policies.tiny import build_tokenizer

MESSAGES = [{"role": "user", "content": "What is 12+34?"}]
BODY = {"model": "tiny", "messages": MESSAGES}


class CountingEngine:
    """Says ``1`` ``size`` times. Fails at the token ``fails_at``."""

    version = 3
    max_model_tokens = 100

    def __init__(self, size: int = 3, fails_at: int | None = None) -> None:
        self._size = size
        self._fails_at = fails_at
        self._token_id = tokenizer().convert_tokens_to_ids("1")
        self.num_sampling = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> TokenOutput:
        outputs = [output async for output in self.stream(prompt_ids, params)]
        return self._output(len(outputs), "stop")

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TokenOutput]:
        self.num_sampling += 1
        try:
            for position in range(self._size):
                await asyncio.sleep(0)
                if position == self._fails_at:
                    raise SamplerError("The engine is gone.")
                yield self._output(1, "stop" if position == self._size - 1 else None)
        finally:
            self.num_sampling -= 1

    def _output(self, size: int, finish_reason: str | None) -> TokenOutput:
        return TokenOutput(
            token_ids=(self._token_id,) * size,
            logprobs=(-0.5,) * size,
            finish_reason=finish_reason,
            policy_version=self.version,
        )


def tokenizer() -> Any:
    return build_tokenizer([MESSAGES])


def frontend(engine: CountingEngine) -> OpenAIFrontend:
    return OpenAIFrontend("tiny", ChatRenderer(tokenizer()), engine)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    replica = SimpleNamespace(_openai=frontend(CountingEngine()))
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(servable_object=replica))
    return replica


@pytest.fixture
def client(replica: SimpleNamespace) -> TestClient:
    return TestClient(http)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_whole_answer_carries_the_policy_version_in_its_header(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 200
    assert response.headers["x-policy-version"] == "3"
    assert response.json()["choices"][0]["message"]["content"] == "111"


def test_the_model_is_listed(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_stream_is_server_sent_events_that_end_with_done(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "111"
    assert done == "[DONE]"


def test_text_completions_are_served(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": [1, 2]})
    assert response.json()["choices"][0]["text"] == "111"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**BODY, "best_of": 2}, 400, "best_of"),
        ({"model": "tiny"}, 400, "messages"),
        ({**BODY, "model": "other"}, 404, "model"),
        ({**BODY, "temperature": -1}, 400, None),
        ({**BODY, "messages": [{"role": "user", "content": "1" * 100}], "stream": True}, 400, None),
    ],
)
def test_refusals_have_openais_shape(
    client: TestClient, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_a_body_that_is_no_json_is_refused(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", content="{", headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_at_once_is_a_503(
    client: TestClient, replica: SimpleNamespace, stream: bool
) -> None:
    replica._openai = frontend(CountingEngine(fails_at=0))
    response = client.post("/v1/chat/completions", json={**BODY, "stream": stream})
    assert response.status_code == 503
    assert "gone" in response.json()["error"]["message"]


def test_an_engine_that_fails_later_ends_the_events_with_an_error(
    client: TestClient, replica: SimpleNamespace
) -> None:
    replica._openai = frontend(CountingEngine(fails_at=2))
    response = client.post("/v1/chat/completions", json={**BODY, "stream": True})
    *chunks, last = events(response.text)
    assert len(chunks) == 3
    assert "gone" in last["error"]["message"]


@pytest.mark.parametrize("spec_version", ["2.0", "2.4"])
def test_a_client_that_hangs_up_ends_the_sampling(spec_version: str) -> None:
    """Servers tell it in two ways: by a message, or (since ASGI 2.4) by an error when something is sent."""
    engine = CountingEngine(size=10**9)
    before = []

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            before.append(engine.num_sampling)
            if spec_version == "2.4":
                raise OSError("The client has hung up.")
            await asyncio.sleep(60)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def hang_up() -> int:
        parts = frontend(engine).chat(ChatRequest.model_validate({**BODY, "stream": True}))
        response: Any = await _respond(parts, stream=True)
        with suppress(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": spec_version}}, receive, send)
        return engine.num_sampling

    after = asyncio.run(hang_up())
    assert (before, after) == ([1], 0)
