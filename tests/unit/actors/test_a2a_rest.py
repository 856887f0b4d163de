"""Agents over A2A's second transport, HTTP and JSON: the official client and bare requests."""

from __future__ import annotations

import httpx
import pytest
from a2a.utils.errors import A2AError
from a2a_client import connected
from agent_server import ALICE, AgentServer
from test_a2a import text_with

pytestmark = pytest.mark.slow  # with the official client, over a real port


@pytest.fixture
def server(keyed_server: AgentServer) -> AgentServer:
    keyed_server.service.reset()
    return keyed_server


@pytest.mark.parametrize("streaming", [False, True])
async def test_message_that_an_agent_cannot_answer_is_an_error(server: AgentServer, streaming: bool) -> None:
    async with connected(server.url, ALICE, "HTTP+JSON", streaming=streaming) as (client, _):
        with pytest.raises(A2AError, match=r"message\.taskId is 'task-1'"):
            async for _ in client.send_message(text_with(task_id="task-1")):
                pass


def ask(server: AgentServer, method: str, path: str, content: str | bytes = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {ALICE}", "a2a-version": "1.0", "content-type": "application/json"}
    url = f"{server.url}/a2a/calculator/{path}"
    return httpx.request(method, url, content=content, headers=headers)


MESSAGE = '{"message": {"role": "ROLE_USER", "messageId": "1", "parts": [{"text": %s}]}}'


@pytest.mark.parametrize("path", ["message:send", "message:stream"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        b'{"\xff": 1}',
        MESSAGE % '"\\ud800"',
        MESSAGE % "3",
        MESSAGE % ("[" * 10_000 + "]" * 10_000),
        '{"configuration": {"historyLength": 1e400}}',
        '{"metadata": {"a": NaN}}',
        '{"metadata": {"a": %s}}' % ("9" * 5_000),
        '{"metadata": %s}' % ('{"a":' * 10_000 + "1" + "}" * 10_000),
    ],
    ids=[
        "nothing",
        "cut",
        "list",
        "number",
        "no_message",
        "bytes",
        "surrogate",
        "type",
        "deep",
        "large",
        "nan",
        "digits",
        "deep_field",
    ],
)
def test_body_that_cannot_be_read_is_the_clients_fault(
    server: AgentServer, path: str, content: str | bytes
) -> None:
    answer = ask(server, "POST", path, content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "tasks/none", 404),
        ("POST", "tasks/none:cancel", 404),
        ("GET", "tasks?pageSize=many", 400),
        ("GET", "tasks?pageSize=-1", 400),
        ("GET", "tasks?pageToken=zzz", 400),
        ("GET", "tasks?statusTimestampAfter=never", 400),
        ("GET", "tasks/none?historyLength=1.5", 400),
        ("GET", "tasks/%ff", 404),
        ("GET", "message:send", 404),
        ("POST", "v1/songs", 404),
        ("GET", "tasks/none/pushNotificationConfigs", 400),
        ("DELETE", "tasks/none/pushNotificationConfigs/1", 400),
        ("GET", "extendedAgentCard", 400),
    ],
)
def test_request_that_is_wrong_has_the_status_of_its_fault(
    server: AgentServer, method: str, path: str, status: int
) -> None:
    answer = ask(server, method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
