"""The real policy server over HTTP in this process: a scripted engine instead of vLLM, and no Ray."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from ray import serve
from scripted_engine import ScriptedEngine
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from actors.served_agents.store import PerKeyLRU
from actors.serving import policy_server
from actors.serving.access import Caller
from actors.serving.http import BodyLimit, http, respond
from actors.serving.intake import OPEN_PATHS
from actors.serving.keys import ApiKeys
from actors.serving.pinned import PinnedPolicy
from actors.serving.policy_server import PolicyServer
from actors.serving.recorded_chat import AnswerPlace
from actors.serving.stored_responses import StoredResponses
from actors.settings import AgentsConfig, RecordingConfig, ServedModel, ServerConfig
from actors.weights.transport import ObjectStoreTransport, WeightTransport
from environments.types import Step, StepEvent, TerminationReason, Trajectory
from policies.agent_api.context import RequestContext
from policies.chat import ChatRenderer, load_tokenizer
from policies.model_api.errors import UnavailableError
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.limits import MAX_BODY_BYTES
from policies.model_api.protocol import ChatRequest
from policies.sampler import SamplingParams
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

if TYPE_CHECKING:
    from openai import OpenAI

MESSAGES = [{"role": "user", "content": "What is 12+34?"}]
BODY = {"model": "tiny", "messages": MESSAGES}

Serving = Callable[..., Any]


class QuietActor:
    """A weight store, and a directory of sampling actors, without anything new: waiting for it never ends."""

    def __init__(self) -> None:
        self.transport = SimpleNamespace(remote=self._transport)
        self.newest = SimpleNamespace(remote=self._nothing)
        self.newer_than = self.samplers_of = SimpleNamespace(remote=self._never)
        self.shared = SimpleNamespace(remote=self._shared)

    async def _transport(self) -> WeightTransport:
        return ObjectStoreTransport("")

    async def _nothing(self) -> None:
        return None

    async def _never(self, *_: Any) -> None:
        await asyncio.Event().wait()

    async def _shared(self, _: str, __: Any) -> Any:
        kept = StoredResponses()

        async def call(method: str, *arguments: Any) -> Any:
            return getattr(kept, method)(*arguments)

        methods = ("keep", "kept", "forget")
        return SimpleNamespace(**{each: SimpleNamespace(remote=partial(call, each)) for each in methods})


def scripted(**options: Any) -> EngineConfig:
    options = {"replies": ["111"], **options}
    return EngineConfig(name="scripted_engine:ScriptedEngine", max_model_tokens=100, options=options)


@contextmanager
def serving(
    folder: Path,
    template: dict[str, Any] | None = None,
    version: int = 0,
    tool_parser: str | None = None,
    max_model_tokens: int = 100,
    agents: dict[str, Any] | None = None,
    keys: ApiKeys = ApiKeys(),  # noqa: B008  # it is frozen
    pinned: dict[str, Any] | None = None,
    instructions: str = "reject",
    recording: RecordingConfig = RecordingConfig(),  # noqa: B008  # nobody changes it
    **options: Any,
) -> Iterator[TestClient]:
    """A client of one replica, which is made in the loop that answers requests, as in Serve."""
    replica_class = PolicyServer.func_or_class.__bases__[0]  # without what Serve wraps around it
    replica = replica_class.__new__(replica_class)
    engine = replace(scripted(**options), max_model_tokens=max_model_tokens)
    own = AgentsConfig(temperature=0.25, instructions=instructions)
    config = ServerConfig(engine=engine, tool_parser=tool_parser, agents=own, recording=recording)

    async def start() -> None:
        actors = QuietActor(), QuietActor()
        model = ServedModel(
            path=str(folder), name="tiny", version=version, chat_template_kwargs=template or {}
        )
        await replica.__init__(model, config, *actors, keys, agents, pinned)

    # What still goes on when the client ends is cancelled, so the patch ends last.
    with pytest.MonkeyPatch.context() as patch, TestClient(http, base_url="http://localhost") as client:
        patch.setattr(policy_server.ray, "cancel", lambda parts: None)
        context = SimpleNamespace(
            servable_object=replica, app_name="app", replica_id=SimpleNamespace(unique_id="r")
        )
        patch.setattr(serve, "get_replica_context", lambda: context)
        assert client.portal is not None
        client.portal.call(start)
        yield client


@pytest.fixture(scope="module")
def client(tokenizer_folder: Path) -> Iterator[TestClient]:
    with serving(tokenizer_folder) as client:
        yield client


@pytest.fixture(scope="module")
def openai(client: TestClient) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url="http://localhost/v1", api_key="EMPTY", max_retries=0, http_client=client)


def parts_of(text: str, stream: bool) -> list[Any]:
    """The parts of an answer, or the only one."""
    return events(text)[:-1] if stream else [json.loads(text)]


def text_of(choice: dict[str, Any]) -> str:
    """Of a message, a delta or a text completion."""
    holder = choice.get("message") or choice.get("delta") or choice
    return str(holder.get("content") or holder.get("text") or "")


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "route",
    [route for route in http.routes if isinstance(route, Route) and route.path not in OPEN_PATHS],
    ids=lambda route: route.path,
)
def test_no_route_answers_under_a_foreign_name(client: TestClient, route: Route) -> None:
    method = sorted(route.methods or ())[0]
    answer = client.request(method, route.path, headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert "server.access.hosts" in answer.json()["error"]["message"]


class Stream:
    """What a call of a deployment's generator returns: the parts, and a way to cancel it."""

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._parts

    def cancel(self) -> None:
        pass


class PinnedReplica:
    """The handle of a pinned version whose replica lives in this process, and says 222."""

    def __init__(
        self,
        folder: Path,
        pinned: ServedModel,
        recording: RecordingConfig = RecordingConfig(),  # noqa: B008  # nobody changes it
    ) -> None:
        self._folder, self._pinned, self._recording, self._replica = folder, pinned, recording, None
        self.answer = SimpleNamespace(remote=lambda *given: Stream(self._answer(*given)))

    def options(self, stream: bool) -> PinnedReplica:
        assert stream
        return self

    async def _answer(self, body: Any, place: AnswerPlace | None) -> AsyncIterator[Any]:
        if self._replica is None:
            config = ServerConfig(engine=scripted(replies=["222"]), recording=self._recording)
            self._replica = PinnedPolicy.func_or_class.__new__(PinnedPolicy.func_or_class)
            await self._replica.__init__(self._pinned, config, None)
        async for part in self._replica.answer(body, place):
            yield part


@pytest.mark.parametrize("stream", [False, True])
def test_pinned_version_answers_by_name_and_costs_tokens(tokenizer_folder: Path, stream: bool) -> None:
    version = ServedModel(path=str(tokenizer_folder), name="tiny@best", version=11)
    pinned = {version.name: (version, PinnedReplica(tokenizer_folder, version))}
    charged: list[int] = []
    with (
        serving(tokenizer_folder, version=31, pinned=pinned) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Caller, "charge_tokens", lambda _, number: charged.append(number))
        for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "1"})):
            for name, text, number in (("tiny@best", "222", 11), ("tiny", "111", 31)):
                body = {"model": name, "stream": stream, **prompt}
                answer = client.post(f"/v1/{path}", json=body)
                assert answer.headers["x-policy-version"] == str(number), answer.text
                said = "".join(text_of(part["choices"][0]) for part in parts_of(answer.text, stream))
                assert said == text
                assert sum(charged) > 3, "the prompt's and the answer's"
                charged.clear()
        body = {"model": "tiny@best", "messages": MESSAGES, "policy_version": 31}
        moved = client.post("/v1/chat/completions", json=body)
        assert (moved.status_code, moved.json()["error"]["code"]) == (409, "policy_version_changed")
        lost = client.post("/v1/chat/completions", json={**body, "model": "tiny@7"})
        assert lost.status_code == 404 and "serves 'tiny', 'tiny@best'" in lost.json()["error"]["message"]
        listed = {each["id"]: each["policy_version"] for each in client.get("/v1/models").json()["data"]}
        assert listed == {"tiny": 31, "tiny@best": 11}
        assert client.get("/v1/models/tiny@best").json()["policy_version"] == 11


def test_whole_answer_carries_the_policy_version_in_its_header(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 200
    assert response.headers["x-policy-version"] == "0"
    assert response.json()["choices"][0]["message"]["content"] == "111"


def test_answers_of_a_checkpoint_say_its_version(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, version=30) as client:
        whole = client.post("/v1/chat/completions", json=BODY)
        parts = events(client.post("/v1/chat/completions", json={**BODY, "stream": True}).text)
        models = client.get("/v1/models").json()["data"]
    assert whole.headers["x-policy-version"] == "30" and whole.json()["policy_version"] == 30
    assert {part["policy_version"] for part in parts[:-1]} == {30}
    assert models[0]["policy_version"] == 30


def test_servers_template_options_hold_unless_requests_differ(tmp_path: Path) -> None:
    tokenizer = build_tokenizer([MESSAGES])
    tokenizer.chat_template = "{{ messages[0].content }}{% if hint %}{{ hint }}{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    with serving(tmp_path, template={"hint": "12"}) as client:
        bodies = [BODY, {**BODY, "chat_template_kwargs": {"hint": "1234"}}]
        answers = [client.post("/v1/chat/completions", json=body).json() for body in bodies]
    num_tokens = len(tokenizer.encode(MESSAGES[0]["content"], add_special_tokens=False))
    assert [answer["usage"]["prompt_tokens"] - num_tokens for answer in answers] == [2, 4]


def test_official_client_lists_the_model(openai: OpenAI) -> None:
    from openai import NotFoundError

    assert [model.id for model in openai.models.list()] == ["tiny"]
    assert openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError, match="serves 'tiny'"):
        openai.models.retrieve("other/model")


def test_who_opens_the_address_is_told_what_is_served(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, agents={"agent/calculator": Pool()}) as client:
        told = client.get("/").text
    assert told.startswith("Troupe serves tiny, agent/calculator to OpenAI clients at http://localhost/v1.")


def test_request_for_an_agent_goes_to_its_pool(tokenizer_folder: Path) -> None:
    step = Step(model_response="46")
    played = Trajectory(steps=[step], termination_reason=TerminationReason.ENV_DONE)

    async def play(
        message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[Trajectory, None]:
        assert message == MESSAGES[0]["content"]
        yield played

    pool = SimpleNamespace(play=SimpleNamespace(remote=partial(Parts, play)))
    with serving(tokenizer_folder, agents={"agent/calculator": pool}) as client:
        answer = client.post("/v1/chat/completions", json={**BODY, "model": "agent/calculator"})
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        model = client.get("/v1/models/agent/calculator").json()
        other = client.post("/v1/chat/completions", json={**BODY, "model": "agent/none"})
    assert answer.json()["choices"][0]["message"]["content"] == "46"
    assert models == ["tiny", "agent/calculator"] and model["id"] == "agent/calculator"
    assert other.status_code == 404 and "'agent/calculator'" in other.json()["error"]["message"]


class Parts:
    """What a call of an actor's generator returns: references to the parts, and a way to cancel it."""

    def __init__(self, play: Callable[..., AsyncGenerator[Any, None]], *arguments: Any) -> None:
        self.parts = play(*arguments)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for part in self.parts:
            reference = asyncio.get_running_loop().create_future()
            reference.set_result(part)
            yield reference


def asynchronous(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: Any) -> Any:
        return method(*arguments)

    return call


class Pool:
    """Answers 46 to everything; stands in for the actor of an agent."""

    def __init__(self) -> None:
        async def play(
            message: str, params: SamplingParams, context: RequestContext
        ) -> AsyncGenerator[StepEvent | Trajectory, None]:
            steps = [Step(model_response="<tool_call>"), Step(model_response="46")]
            yield StepEvent(index=0, text="<tool_call>", observation="46.0")
            yield StepEvent(index=1, text="46", observation="", done=True)
            yield Trajectory(steps=steps, termination_reason=TerminationReason.ENV_DONE)

        store: PerKeyLRU[dict[str, Any]] = PerKeyLRU()

        def keep(owner: str, response: dict[str, Any]) -> None:
            store.keep(owner, response["id"], response)

        methods = {
            "keep": keep,
            "kept": store.kept,
            "forget": store.forget,
            "withdraw": lambda owner, key: False,
        }
        self.call = SimpleNamespace(
            remote=asynchronous(lambda part, method, *arguments: methods[method](*arguments))
        )
        self.play = SimpleNamespace(remote=partial(Parts, play))


@pytest.fixture
def agent(tokenizer_folder: Path) -> Iterator[OpenAI]:
    """The official client of a server with an agent."""
    from openai import OpenAI

    with serving(tokenizer_folder, agents={"agent/calculator": Pool()}) as client:
        yield OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0)


def test_official_client_gets_and_retrieves_a_response(agent: OpenAI) -> None:
    from openai import BadRequestError, NotFoundError

    response = agent.responses.create(model="agent/calculator", input="What is 12+34?", metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == ("46", "completed", {"a": "b"})
    assert agent.responses.retrieve(response.id).output_text == "46"
    with pytest.raises(BadRequestError, match="has ended"):
        agent.responses.cancel(response.id)
    agent.responses.delete(response.id)
    for gone in (response.id, "resp_none"):
        with pytest.raises(NotFoundError, match="There is no response"):
            agent.responses.retrieve(gone)
    forgotten = agent.responses.create(
        model="agent/calculator", input=[{"role": "user", "content": "?"}], store=False
    )
    with pytest.raises(NotFoundError, match="store=false"):
        agent.responses.retrieve(forgotten.id)


def test_official_client_streams_a_response_of_an_agent(agent: OpenAI) -> None:
    with agent.responses.stream(model="agent/calculator", input="What is 12+34?") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "46"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(15))
    step, answer = agent.responses.retrieve(events[-1].response.id).output
    assert (step.type, step.summary[0].text, answer.type) == ("reasoning", "<tool_call>\n46.0", "message")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "agent/none"}, "no agent 'agent/none' .* Agents that do: 'agent/calculator'"),
        ({"instructions": "Be brief."}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"temperature": 3}, "temperature"),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "send one user message",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "input"),
    ],
)
def test_field_that_agent_cannot_act_on_is_error_by_its_name(
    agent: OpenAI, fields: dict[str, Any], said: str
) -> None:
    from openai import BadRequestError, NotFoundError

    with pytest.raises((BadRequestError, NotFoundError), match=said):
        agent.responses.create(**{"model": "agent/calculator", "input": "?", **fields})


def test_health_and_metrics_tell_of_the_engine(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, fails_at=1) as client:
        assert client.get("/health").json() == {"status": "ok", "policy_version": 0}
        client.post("/v1/chat/completions", json=BODY)
        assert client.get("/health").status_code == 503
        lines = client.get("/metrics").text.splitlines()
    assert "# TYPE troupe_policy_version gauge" in lines and "troupe_policy_version 0" in lines
    assert "troupe_sampled_tokens_total 1" in lines


def test_official_client_reads_the_same_from_stream_and_whole(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    whole = openai.chat.completions.create(**options)
    parts = list(openai.chat.completions.create(**options, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "11"
    assert whole.choices[0].message.content == "11"
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 2


def test_official_client_names_the_error_of_a_bad_request(openai: OpenAI) -> None:
    from openai import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError, match="serves 'tiny'"):
        openai.chat.completions.create(model="gpt", messages=MESSAGES)  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match="context"):
        openai.completions.create(model="tiny", prompt=[5] * 100)
    assert openai.completions.create(model="tiny", prompt=[5]).choices[0].text == "111"


def test_setting_chooses_the_parser_of_tool_calls(tokenizer_folder: Path) -> None:
    call = '{"name": "f", "parameters": {}}'
    body = {**BODY, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for parser, reason in (("llama3-json", "tool_calls"), (None, "stop")):
        with serving(tokenizer_folder, tool_parser=parser, max_model_tokens=300, replies=[call]) as client:
            choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == reason, choice


def test_official_client_sees_a_call_grow(tokenizer_folder: Path) -> None:
    from openai import OpenAI

    call = '{"name": "f", "parameters": {"a": "one two three"}}'
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with serving(tokenizer_folder, tool_parser="llama3-json", max_model_tokens=300, replies=[call]) as http:
        client = OpenAI(base_url="http://localhost/v1", api_key="EMPTY", max_retries=0, http_client=http)
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=tools) as stream:
            kinds = [event.type for event in stream]
            choice = stream.get_final_completion().choices[0]
    calls = choice.message.tool_calls or []
    assert [json.loads(each.function.arguments) for each in calls] == [{"a": "one two three"}]
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert choice.finish_reason == "tool_calls"


def test_stream_is_server_sent_events_that_end_with_done(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-policy-version"] == "0"
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
def test_errors_have_openais_shape(
    client: TestClient, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


JSON_HEADERS = {"content-type": "application/json"}


def test_body_that_is_no_json_is_an_error(client: TestClient) -> None:
    for content in ("{", "[" * 100_000):
        response = client.post("/v1/chat/completions", content=content, headers=JSON_HEADERS)
        assert response.status_code == 400
        assert re.search("JSON|body", response.json()["error"]["message"])


def test_unknown_address_or_method_is_error_in_openais_shape(client: TestClient) -> None:
    for response, status in ((client.get("/v2/models"), 404), (client.put("/v1/models"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_unexpected_error_has_openais_shape(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenAIFrontend, "chat", lambda *_: 1 / 0)
    with serving(tokenizer_folder) as client:
        quiet = TestClient(client.app, "http://localhost", raise_server_exceptions=False)
        response = quiet.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "division by zero"


def test_body_too_large_is_an_error_with_and_without_length(client: TestClient) -> None:
    declared = client.post("/v1/completions", content=b"1" * (MAX_BODY_BYTES + 1), headers=JSON_HEADERS)
    assert declared.status_code == 413
    assert declared.json()["error"]["message"].startswith("The body is larger than 4194304 bytes")

    def pieces() -> Iterator[bytes]:
        yield from [b"1" * (MAX_BODY_BYTES // 4)] * 5

    assert client.post("/v1/completions", content=pieces(), headers=JSON_HEADERS).status_code == 413
    assert client.post("/v1/chat/completions", json=BODY).status_code == 200, "others are served"


def test_slow_body_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.serving.http.MAX_BODY_SECONDS", 0.05)
    sent: list[dict[str, Any]] = []

    async def never() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"content-length", b"9")]}
    asyncio.run(BodyLimit(lambda *_: pytest.fail("The body was taken."))(scope, never, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 408


@pytest.mark.parametrize("stream", [False, True])
def test_engine_that_fails_at_once_is_a_503(tokenizer_folder: Path, stream: bool) -> None:
    with serving(tokenizer_folder, fails_at=0) as client:
        response = client.post("/v1/chat/completions", json={**BODY, "stream": stream})
    assert response.status_code == 503
    assert "script has failed" in response.json()["error"]["message"]


def test_engine_that_fails_later_ends_events_with_error(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, fails_at=2) as client:
        response = client.post("/v1/chat/completions", json={**BODY, "stream": True})
    *chunks, last = events(response.text)
    assert len(chunks) == 3
    assert "script has failed" in last["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprob", ["-inf", "nan"])
def test_logprob_not_finite_is_an_error_that_names_the_engine(
    tokenizer_folder: Path, logprob: str, stream: bool
) -> None:
    with serving(tokenizer_folder, logprob=logprob) as client:
        response = client.post("/v1/chat/completions", json={**BODY, "stream": stream, "logprobs": True})
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert message.startswith("ScriptedEngine (pid ") and f"log-probability {logprob} for token 0" in message


@pytest.mark.parametrize("spec_version", ["2.0", "2.4"])
async def test_client_that_disconnects_ends_the_sampling(tokenizer_folder: Path, spec_version: str) -> None:
    """Servers tell it in two ways: by a message, or (since ASGI 2.4) by an error when something is sent."""
    config = scripted(replies=["1" * 10_000])
    config.max_model_tokens = 10_000
    engine = ScriptedEngine(str(tokenizer_folder), config, {})
    frontend = OpenAIFrontend("tiny", ChatRenderer(load_tokenizer(str(tokenizer_folder))), engine)
    before = []

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            before.append(engine.num_running)
            if spec_version == "2.4":
                raise OSError("The client has disconnected.")
            await asyncio.sleep(60)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    parts = frontend.chat(ChatRequest.model_validate({**BODY, "stream": True}))
    response: Any = await respond(parts, stream=True)
    with suppress(ClientDisconnect):
        await response({"type": "http", "asgi": {"spec_version": spec_version}}, receive, send)
    assert (before, engine.num_running) == ([1], 0)


def test_body_that_is_no_json_is_told_by_its_content_type(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = client.post("/v1/chat/completions", content=json.dumps(BODY), headers={"content-type": kind})
        assert answer.status_code == 415
        assert f"sent as {kind!r}" in answer.json()["error"]["message"]


def test_idempotency_key_for_a_model_is_an_error(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json=BODY, headers={"idempotency-key": "1"})
    assert answer.status_code == 400 and "Idempotency-Key" in answer.json()["error"]["message"]


def test_kept_response_is_not_streamed(client: TestClient) -> None:
    answer = client.get("/v1/responses/resp_1?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


def test_address_not_served_is_answered_with_those_served(client: TestClient) -> None:
    answer = client.post("/v1/embeddings", json={"model": "tiny"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models"):
        assert path in message


def test_tokens_are_counted_by_model_and_key(client: TestClient) -> None:
    def tokens() -> float:
        text = client.get("/metrics").text
        return sum(
            map(float, re.findall(r'^troupe_http_tokens_total{key="-",model="tiny"} (.*)', text, re.M))
        )

    before = tokens()
    used = client.post("/v1/chat/completions", json=BODY).json()["usage"]["total_tokens"]
    assert tokens() - before == used > 0
    client.post("/v1/chat/completions", json={**BODY, "model": "stranger"})
    assert "stranger" not in client.get("/metrics").text


def test_server_is_ready_when_its_agents_are(tokenizer_folder: Path) -> None:
    is_open = False

    async def check() -> None:
        if not is_open:
            raise UnavailableError("The agents are still starting.", retry_after=2)

    pool = SimpleNamespace(check=SimpleNamespace(remote=check))
    with serving(tokenizer_folder, agents={"agent/calculator": pool}) as client:
        starting = client.get("/ready")
        assert client.get("/health").status_code == 200
        is_open = True
        assert client.get("/ready").json()["status"] == "ok"
        assert client.head("/ready").status_code == 200
    assert (starting.status_code, starting.headers["retry-after"]) == (503, "2")
