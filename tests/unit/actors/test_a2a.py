"""Agents over A2A: the official client against the real application, on a port of this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client.errors import AgentCardResolutionError
from a2a.helpers.proto_helpers import new_text_message
from a2a.types.a2a_pb2 import (
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskPushNotificationConfig,
)
from a2a.utils.errors import A2AError, TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError
from a2a_client import QUESTION, connected, only_task, question, state, until
from agent_server import ALICE, BOB, AgentServer, agent_server
from ray import serve

pytestmark = pytest.mark.slow  # with the official clients, over a real port

BINDINGS = pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])


@pytest.mark.parametrize("path", ["", "/a2a/calculator"])
async def test_card_tells_who_answers_where_and_how(server: AgentServer, path: str) -> None:
    async with connected(server.url + path) as (_, card):
        pass
    assert (card.name, card.description) == ("agent/calculator", "Adds numbers.")
    assert card.capabilities.streaming and not card.capabilities.push_notifications
    assert [(each.url, each.protocol_binding) for each in card.supported_interfaces] == [
        (f"{server.url}/a2a/calculator", binding) for binding in ("JSONRPC", "HTTP+JSON")
    ]
    assert not card.security_requirements


@BINDINGS
async def test_message_is_answered_by_task_that_can_be_asked_for_again(
    server: AgentServer, binding: str
) -> None:
    async with connected(server.url, binding=binding, streaming=False) as (client, _):
        task = await only_task(client, question())
        listed = await client.list_tasks(ListTasksRequest(context_id=task.context_id))
        again = await client.get_task(GetTaskRequest(id=task.id))
    assert state(task) == "COMPLETED" and [each.id for each in listed.tasks] == [task.id]
    for each in (task, again):
        assert [part.text for artifact in each.artifacts for part in artifact.parts] == ["46"]
        assert [part.text for message in each.history for part in message.parts] == [QUESTION]
    assert again.metadata["policy_version"] == 7 and again.metadata["finish_reason"] == "stop"


async def test_message_is_answered_at_the_servers_temperature(server: AgentServer) -> None:
    async with connected(server.url, streaming=False) as (client, _):
        await only_task(client, question())
    (request,) = server.service.asked
    assert request.params is not None and request.params.temperature == 0.25


async def test_next_task_of_context_goes_on_with_conversation(server: AgentServer) -> None:
    async with connected(server.url, streaming=False) as (client, _):
        first = await only_task(client, question("First"))
        again = question("Second")
        again.message.context_id = first.context_id
        second = await only_task(client, again)
        await only_task(client, question("Another conversation"))
    assert [state(first), state(second)] == ["COMPLETED", "COMPLETED"]
    asked, follow_up, other = server.service.asked
    assert follow_up.follow_up is not None and follow_up.follow_up.after == asked.rollout_id
    assert follow_up.follow_up.message == "Second" and other.follow_up is None


async def test_context_is_closed_as_a_session(server: AgentServer) -> None:
    async with connected(server.url, streaming=False) as (client, _):
        task = await only_task(client, question())
    closed = httpx.delete(f"{server.url}/v1/sessions/{task.context_id}")
    assert closed.status_code == 200
    assert server.service.forgotten == [server.service.asked[0].rollout_id]


async def test_stream_tells_the_states_of_a_task_while_they_change(server: AgentServer) -> None:
    server.service.is_busy = True
    told = []
    async with connected(server.url) as (client, _):
        async for event in client.send_message(question()):
            kind = event.WhichOneof("payload")
            if kind == "task":
                told.append(state(event.task))
            elif kind == "artifact_update":
                told.append(event.artifact_update.artifact.parts[0].text)
            else:
                told.append(state(event.status_update))
            if told[-1] == "WORKING":  # it came before there was an answer
                server.service.finish(await until(waiting(server)) and server.service.take())
    assert told == ["SUBMITTED", "WORKING", "46", "COMPLETED"]


def waiting(server: AgentServer) -> Callable[[], Awaitable[bool]]:
    async def is_waiting() -> bool:
        return bool(server.service.waiting)

    return is_waiting


@BINDINGS
async def test_message_that_waits_is_cancelled_and_its_stream_ends(server: AgentServer, binding: str) -> None:
    server.service.is_busy = True
    async with connected(server.url, binding=binding) as (client, _):
        events = []

        async def listen() -> None:
            async for event in client.send_message(question()):
                events.append(event)

        listening = asyncio.create_task(listen())
        await until(waiting(server))
        await until(lambda: asyncio.sleep(0, events))
        task_id = events[0].task.id
        cancelled = await client.cancel_task(CancelTaskRequest(id=task_id))
        async with asyncio.timeout(60):
            await listening
        with pytest.raises(TaskNotCancelableError, match="has ended: its state is TASK_STATE_CANCELED"):
            await client.cancel_task(CancelTaskRequest(id=task_id))
        again = await client.get_task(GetTaskRequest(id=task_id))
    assert (state(cancelled), state(again)) == ("CANCELED", "CANCELED")
    assert state(events[-1].status_update) == "CANCELED"


async def test_episode_in_play_is_cancelled_and_answers_too_late(server: AgentServer) -> None:
    server.service.is_busy = True
    async with connected(server.url, streaming=False) as (client, _):
        task = await only_task(client, question(return_immediately=True))
        await until(waiting(server))
        played = server.service.take()
        assert state(await client.cancel_task(CancelTaskRequest(id=task.id))) == "CANCELED"
        server.service.finish(played)
        await asyncio.sleep(0.2)
        assert state(await client.get_task(GetTaskRequest(id=task.id))) == "CANCELED"


async def test_task_goes_on_when_its_client_has_hung_up(server: AgentServer) -> None:
    server.service.is_busy = True
    async with connected(server.url) as (client, _):
        stream = client.send_message(question())
        task = (await anext(stream)).task
        await stream.aclose()
    await until(waiting(server))
    server.service.finish(server.service.take())
    async with connected(server.url) as (client, _):

        async def ended() -> Task | None:
            found = await client.get_task(GetTaskRequest(id=task.id))
            return found if state(found) not in ("SUBMITTED", "WORKING") else None

        task = await until(ended)
    assert (state(task), task.artifacts[0].parts[0].text) == ("COMPLETED", "46")


@BINDINGS
async def test_second_client_can_follow_a_task_that_runs(server: AgentServer, binding: str) -> None:
    server.service.is_busy = True
    async with connected(server.url, binding=binding, streaming=False) as (client, _):
        task = await only_task(client, question(return_immediately=True))
    await until(waiting(server))
    events = []
    async with connected(server.url, binding=binding) as (client, _):
        async for event in client.subscribe(SubscribeToTaskRequest(id=task.id)):
            events.append(event)
            if len(events) == 1:
                server.service.finish(server.service.take())
    assert events[0].HasField("task") and state(events[-1].status_update) == "COMPLETED"


def become_another_replica() -> None:
    """Answer as a replica that has played nothing yet, beside the one that plays on."""
    protocols = serve.get_replica_context().servable_object.agents
    del vars(protocols)["a2a"]


async def test_another_replica_knows_a_task_and_cancels_it(server: AgentServer) -> None:
    server.service.is_busy = True

    async def said_why(task_id: str) -> Task:
        """What the first replica has written, which played the message."""
        async with connected(server.url) as (client, _):

            async def has_message() -> Task | None:
                found = await client.get_task(GetTaskRequest(id=task_id))
                return found if found.status.HasField("message") else None

            return await until(has_message)

    async with connected(server.url, streaming=False) as (client, _):
        task = await only_task(client, question(return_immediately=True))
        await until(waiting(server))
        become_another_replica()
        assert state(await client.get_task(GetTaskRequest(id=task.id))) == "WORKING"
        cancelled = await client.cancel_task(CancelTaskRequest(id=task.id))
        assert state(cancelled) == "CANCELED"
        await until(lambda: asyncio.sleep(0, not server.service.waiting))
    task = await said_why(task.id)
    assert state(task) == "CANCELED" and "was cancelled" in task.status.message.parts[0].text


async def test_task_of_another_replica_cannot_be_followed_here(server: AgentServer) -> None:
    server.service.is_busy = True
    async with connected(server.url, streaming=False) as (client, _):
        task = await only_task(client, question(return_immediately=True))
    await until(waiting(server))
    become_another_replica()
    async with connected(server.url) as (client, _):
        with pytest.raises(UnsupportedOperationError, match=f"{task.id}' runs on another replica"):
            async for _ in client.subscribe(SubscribeToTaskRequest(id=task.id)):
                pass


MESSAGE = '{"role": "ROLE_USER", "messageId": "1", "parts": [{"text": %s}]}'
SEND = '{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": %s}}' % MESSAGE  # noqa: UP031


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", -32700),
        ("[]", -32600),
        ("3", -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "Sing"}', -32601),
        (SEND % '"\\ud800"', -32602),
        (SEND % "3", -32602),
        (SEND % ("[" * 10_000 + "]" * 10_000), None),
    ],
    ids=["cut", "list", "number", "method", "surrogate", "type", "deep"],
)
def test_request_that_cannot_be_read_is_an_error_of_json_rpc(
    server: AgentServer, body: str, code: int | None
) -> None:
    answer = httpx.post(f"{server.url}/a2a/calculator", content=body, headers={"a2a-version": "1.0"})
    assert answer.status_code == 200
    error = answer.json()["error"]
    assert code is None or error["code"] == code, error


async def test_failed_episode_is_a_failed_task_without_its_traceback(server: AgentServer) -> None:
    server.service.is_busy = True
    async with connected(server.url, streaming=False) as (client, _):
        asked = asyncio.create_task(only_task(client, question()))
        await until(waiting(server))
        server.service.fail(server.service.take(), "it broke\n  at line 3")
        task = await asked
    text = task.status.message.parts[0].text
    assert state(task) == "FAILED" and "it broke" in text and "line 3" not in text


async def test_message_of_which_there_are_too_many_is_rejected(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.served_agents.messages.MAX_WAITING_PER_ACTOR", 0)
    async with connected(server.url, streaming=False) as (client, _):
        task = await only_task(client, question())
    assert state(task) == "REJECTED" and "try again later" in task.status.message.parts[0].text


def text_with(**fields: Any) -> SendMessageRequest:
    message = new_text_message(QUESTION, role=Role.ROLE_USER)
    message.MergeFrom(Message(**fields))
    return SendMessageRequest(message=message)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (text_with(role=Role.ROLE_AGENT), "message.role is ROLE_AGENT"),
        (text_with(task_id="task-1"), "message.taskId is 'task-1'"),
        (text_with(parts=[Part(url="http://x/a.png")]), r"message.parts\[1\] is of kind 'url'"),
        (question(""), "message.parts has no text"),
        (question(accepted_output_modes=["image/png"]), r"\['image/png'\]: agents answer in text/plain"),
        (
            question(task_push_notification_config=TaskPushNotificationConfig(url="http://x")),
            "this server pushes nothing",
        ),
    ],
)
async def test_what_an_agent_cannot_answer_is_an_error_that_says_so(
    server: AgentServer, request_: SendMessageRequest, said: str, streaming: bool
) -> None:
    async with connected(server.url, streaming=streaming) as (client, _):
        with pytest.raises(A2AError, match=said):
            async for _ in client.send_message(request_):
                pass


async def test_task_that_does_not_exist_is_an_error(server: AgentServer) -> None:
    async with connected(server.url) as (client, _):
        with pytest.raises(TaskNotFoundError):
            await client.get_task(GetTaskRequest(id="none"))
        with pytest.raises(TaskNotFoundError, match="no task 'none'"):
            await client.cancel_task(CancelTaskRequest(id="none"))


@BINDINGS
async def test_agent_needs_its_key_and_a_task_belongs_to_its_key(locked: AgentServer, binding: str) -> None:
    with pytest.raises(AgentCardResolutionError, match="401"):
        async with connected(locked.url):
            pass
    async with connected(locked.url, ALICE, binding=binding, streaming=False) as (client, card):
        assert card.security_schemes["key"].http_auth_security_scheme.scheme == "Bearer"
        task = await only_task(client, question())
    async with connected(locked.url, BOB, binding=binding) as (client, _):
        for call in (
            client.get_task(GetTaskRequest(id=task.id)),
            client.cancel_task(CancelTaskRequest(id=task.id)),
        ):
            with pytest.raises(TaskNotFoundError):
                await call
        assert not (await client.list_tasks(ListTasksRequest())).tasks
    path = "/a2a/calculator" if binding == "JSONRPC" else "/a2a/calculator/message:send"
    answer = httpx.post(locked.url + path, json={}, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


async def test_tokens_of_a_task_are_counted_for_its_key(
    locked: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[tuple[str | None, int]] = []
    monkeypatch.setattr(
        "actors.serving.access.Caller.charge_tokens", lambda self, number: charged.append((self.name, number))
    )
    async with connected(locked.url, ALICE) as (client, _):
        async for _ in client.send_message(question()):
            pass
    assert charged == [("alice", 11)]


@pytest.mark.parametrize("header", ["host", "origin"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/.well-known/agent-card.json"),
        ("GET", "/a2a/calculator/.well-known/agent-card.json"),
        ("POST", "/a2a/calculator"),
        ("POST", "/mcp"),
    ],
)
def test_foreign_name_reaches_no_agent(server: AgentServer, header: str, method: str, path: str) -> None:
    value = "evil.example" if header == "host" else "http://evil.example"
    answer = httpx.request(method, server.url + path, headers={header: value})
    assert answer.status_code == 403 and "evil.example" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/a2a/none", "/a2a/none/.well-known/agent-card.json"])
def test_agent_that_is_not_served_is_error_with_those_that_are(server: AgentServer, path: str) -> None:
    answer = httpx.request("GET" if path.endswith("json") else "POST", server.url + path)
    assert answer.status_code == 404
    assert "/a2a/calculator/.well-known/agent-card.json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        ({"X-Forwarded-Prefix": "/troupe"}, "http://{host}/troupe/a2a/calculator"),
        ({"X-Forwarded-Prefix": "/a/b/", "X-Forwarded-Proto": "https"}, "https://{host}/a/b/a2a/calculator"),
        ({"X-Forwarded-Prefix": "evil.example"}, "http://{host}/a2a/calculator"),
        ({"X-Forwarded-Prefix": "//evil.example"}, "http://{host}/a2a/calculator"),
    ],
)
def test_card_has_the_address_before_the_proxy(
    server: AgentServer, headers: dict[str, str], address: str
) -> None:
    card = httpx.get(f"{server.url}/.well-known/agent-card.json", headers=headers).json()
    host = server.url.removeprefix("http://")
    assert [each["url"] for each in card["supportedInterfaces"]] == 2 * [address.format(host=host)]


def test_agents_have_a_card_each_and_one_address_names_them(
    tokenizer_folder: Path,
) -> None:
    with agent_server(tokenizer_folder, agents=["agent/a", "agent/b"]) as server:
        common = httpx.get(f"{server.url}/.well-known/agent-card.json")
        own = httpx.get(f"{server.url}/a2a/b/.well-known/agent-card.json").json()
    assert common.status_code == 404 and "/a2a/b/.well-known" in common.json()["error"]["message"]
    assert own["name"] == "agent/b"


def test_without_the_package_the_server_says_how_to_install_it(
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "actors.served_agents.a2a", raising=False)
    monkeypatch.setitem(sys.modules, "a2a.helpers.proto_helpers", None)
    with agent_server(tokenizer_folder) as server:
        answer = httpx.post(f"{server.url}/a2a/calculator", json={})
        models = httpx.get(f"{server.url}/v1/models")
    assert answer.status_code == 501 and "pip install 'troupe[a2a]'" in answer.json()["error"]["message"]
    assert models.status_code == 200
