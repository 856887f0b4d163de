"""Compaction of conversations by the policy: what it reads, what is kept, and how later requests read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent_server import ALICE, KEYS
from openai import OpenAI
from test_policy_http import serving
from test_responses_socket import bearer, socket_of

from policies.model_api.dialects.responses import Compact, Responses
from policies.model_api.dialects.responses_request import SUMMARY
from policies.model_api.errors import InvalidRequestError

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

Json = dict[str, Any]
QUESTION = "What is 12+34?"
ITEMS: list[Json] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": QUESTION},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I add."}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "46"},
    {"role": "assistant", "content": "46"},
    {"id": "msg_own", "role": "user", "content": [{"type": "input_text", "text": "Twice that?"}]},
]


@pytest.fixture(scope="module")
def client(tokenizer_folder: Path) -> Iterator[TestClient]:
    with serving(tokenizer_folder, max_model_tokens=4000) as client:
        yield client


def compacted(client: TestClient, given: Any = ITEMS, **fields: Any) -> Json:
    answer = client.post("/v1/responses/compact", json={"model": "tiny", "input": given, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_policy_sums_the_conversation_up(client: TestClient) -> None:
    whole = client.post("/v1/responses", json={"model": "tiny", "input": ITEMS}).json()
    answer = compacted(client, prompt_cache_key="mine")
    *kept, summary = answer["output"]
    assert answer["object"] == "response.compaction" and answer["id"].startswith("resp_")
    assert [each["role"] for each in kept] == ["developer", "user", "user"]
    assert [each["content"][0]["text"] for each in kept] == ["Be brief.", QUESTION, "Twice that?"]
    assert kept[2]["id"] == "msg_own" and len({each["id"] for each in kept}) == 3
    assert {each["status"] for each in kept} == {"completed"}
    assert (summary["type"], summary["encrypted_content"]) == ("compaction", f"{SUMMARY}111")
    assert summary["id"].startswith("cmp_")
    assert answer["usage"]["input_tokens"] > whole["usage"]["input_tokens"], "it reads what it is to do"
    assert answer["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert client.get(f"/v1/responses/{answer['id']}").status_code == 404, "nothing is stored"


def test_later_request_reads_the_summary_as_what_was_answered(client: TestClient) -> None:
    output = compacted(client)["output"]
    given = [*output, {"role": "user", "content": "So?"}]
    messages = Responses({"model": "tiny", "input": given}).chat_request().messages
    assert [each.role for each in messages] == ["developer", "user", "user", "assistant", "user"]
    assert messages[3].content == f"{SUMMARY}111"
    body = {"model": "tiny", "input": given, "store": False}
    response = client.post("/v1/responses", json=body).json()
    assert response["status"] == "completed"
    with socket_of(client) as socket:
        first = socket.ask(given, store=False)
        assert first["usage"] == response["usage"]
        assert socket.ask("Why?", store=False, previous_response_id=first["id"])["status"] == "completed"
    again = compacted(client, given)["output"]
    assert [each["type"] for each in again] == ["message"] * 4 + ["compaction"], "one summary has them all"


def test_stored_conversation_is_summed_up(client: TestClient) -> None:
    first = client.post("/v1/responses", json={"model": "tiny", "input": QUESTION}).json()
    for given, texts in ((None, [QUESTION]), ("Then?", [QUESTION, "Then?"])):
        output = compacted(client, given, previous_response_id=first["id"])["output"]
        assert [part["content"][0]["text"] for part in output[:-1]] == texts


def test_picture_is_kept() -> None:
    shown = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    dialect = Compact({"model": "tiny", "input": [{"role": "user", "content": [shown]}]})
    message = {"role": "assistant", "content": "<think>\nI look.\n</think>\n\nIt is red."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "chatcmpl-1", "created": 1, "policy_version": 3}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    kept, summary = dialect.answer({**head, "choices": [choice], "usage": usage})["output"]
    assert kept["content"] == [shown | {"detail": "auto"}]
    assert summary["encrypted_content"] == f"{SUMMARY}It is red.", "thoughts are no part of it"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"model": None}, "model", "model: "),
        ({"input": None}, "input", "there is none"),
        ({"input": []}, "input", "there is none"),
        ({"stream": True}, "stream", "does not support the field"),
        ({"tools": []}, "tools", "does not support the field"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "no response 'resp_none'"),
        ({"model": "agent/calculator"}, "model", "serves 'tiny'"),
    ],
)
def test_error_names_the_field(client: TestClient, fields: Json, param: str, said: str) -> None:
    body = {
        name: each for name, each in {"model": "tiny", "input": "?", **fields}.items() if each is not None
    }
    answer = client.post("/v1/responses/compact", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if "agent" in str(fields) else 400, param)
    assert said in error["message"]


def test_summary_of_another_server_is_refused() -> None:
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAABpM0Yj"}
    with pytest.raises(InvalidRequestError, match="another server has written it") as caught:
        Responses({"model": "tiny", "input": [item]})
    assert caught.value.param == "input.0.encrypted_content"


def test_compaction_is_charged_as_a_call(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, keys=KEYS, max_model_tokens=4000) as client:
        client.headers.update(bearer(ALICE))
        usage = compacted(client)["usage"]
        text = client.get("/metrics").text
        assert f'troupe_http_tokens_total{{key="alice",model="tiny"}} {usage["total_tokens"]:.1f}' in text
        assert 'key="alice",route="/v1/responses/compact",status="200"' in text
        client.headers.clear()
        stranger = client.post("/v1/responses/compact", json={"model": "tiny", "input": "?"})
        assert stranger.status_code == 401


def test_official_client_compacts(client: TestClient) -> None:
    openai = OpenAI(base_url="http://localhost/v1", api_key="EMPTY", max_retries=0, http_client=client)
    compaction = openai.responses.compact(model="tiny", input=ITEMS)
    assert [each.type for each in compaction.output] == ["message"] * 3 + ["compaction"]
    given: Any = [*compaction.output, {"role": "user", "content": "So?"}]
    assert openai.responses.create(model="tiny", input=given).output_text == "111"
