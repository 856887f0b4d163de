"""Feedback over HTTP on recorded answers of an agent: who may give it, and what a deletion reaches."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agent_server import AGENT, ALICE, BOB, KEYS, AgentServer, agent_server
from fastapi.testclient import TestClient
from kept_recordings import KeptRecording, kept_recordings

from actors.settings import RecordingConfig
from environments.data.recordings import DAY_SECONDS, MAX_COMMENT, read_recordings
from launch.viewing.pages import FILES, application
from launch.viewing.talk import KEY_VARIABLE

Headers = dict[str, str]

DYING_SERVER = """
import os
import signal
import sys
import time
from pathlib import Path

from agent_server import KEYS, agent_server

from actors.settings import RecordingConfig

folder, model, moment = sys.argv[1:]
link = os.link


def dying_link(source, target):
    if not str(target).endswith(".feedback.json"):
        return link(source, target)
    if moment == "after":
        link(source, target)
    os.kill(os.getpid(), signal.SIGKILL)


os.link = dying_link
with agent_server(Path(model), KEYS, recording=RecordingConfig(folder=folder)) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""
"""A server that is killed by the first feedback: before or after that has its place on the disk."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


@pytest.fixture
def recorded(tokenizer_folder: Path, folder: Path) -> Iterator[AgentServer]:
    """A server with keys that records its answers."""
    with agent_server(tokenizer_folder, KEYS, recording=RecordingConfig(folder=str(folder))) as server:
        yield server


def send(
    server: AgentServer,
    method: str,
    path: str,
    body: Any = None,
    key: str = ALICE,
    headers: Headers | None = None,
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **(headers or {})}
    content = None if body is None else json.dumps(body)  # NaN too, unlike httpx
    headers |= {"Content-Type": "application/json"}
    return httpx.request(method, f"{server.url}{path}", content=content, headers=headers, timeout=60)


def respond(server: AgentServer, headers: Headers | None = None, **fields: Any) -> httpx.Response:
    body = {"model": AGENT, "input": "Say hi", **fields}
    return send(server, "POST", "/v1/responses", body, headers=headers)


def chat(server: AgentServer, headers: Headers | None = None, **fields: Any) -> httpx.Response:
    body = {"model": AGENT, "messages": [{"role": "user", "content": "Say hi"}], **fields}
    return send(server, "POST", "/v1/chat/completions", body, headers=headers)


def judge(server: AgentServer, answer_id: str, body: Any, key: str = ALICE) -> httpx.Response:
    return send(server, "POST", f"/v1/responses/{answer_id}/feedback", body, key)


def code_of(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


def kept(folder: Path) -> dict[str, KeptRecording]:
    return {each.answer.answer_id: each for each in kept_recordings(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("post", [respond, chat])
def test_answer_is_recorded_with_its_tokens(
    recorded: AgentServer, folder: Path, post: Any, stream: bool
) -> None:
    answer = post(recorded, stream=stream)
    assert answer.headers["x-troupe-recorded"] == "yes" and '"recorded": true' in answer.text.replace(
        '"recorded":true', '"recorded": true'
    )
    (recording,) = kept(folder).values()
    assert recording.answer.answer_id in answer.text
    assert (recording.answer.owner, recording.answer.model) == ("alice", AGENT)
    (completion,) = recording.trajectory.completions
    assert completion.prompt_ids == (1,) * 10 and completion.completion_ids == (1,)
    assert completion.logprobs == (0.0,) and completion.policy_version == 7
    assert recording.trajectory.task == {"question": "Say hi"} and recording.feedback is None


@pytest.mark.slow
def test_thumb_on_the_page_is_kept_with_its_answer(
    recorded: AgentServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the requests that the script of ``launch.view`` sends."""
    monkeypatch.setenv(KEY_VARIABLE, ALICE)
    script = (FILES / "page.js").read_text()
    assert set(re.findall(r'fetch\("(api/\w+)", \{ method: "POST"', script)) == {"api/talk", "api/feedback"}
    assert "JSON.stringify({ answer_id: each.id, thumb })" in script
    shown = application([tmp_path], server=f"{recorded.url}/v1")
    with TestClient(shown, base_url="http://127.0.0.1") as page:
        talk = {"model": AGENT, "messages": [{"role": "user", "content": "Hi"}]}
        lines = page.post("/api/talk", json=talk).text.splitlines()
        parts = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
        assert parts[-1]["recorded"]
        given = {"answer_id": parts[-1]["id"], "thumb": "up"}
        kept_as = page.post("/api/feedback", json=given)
        assert (
            kept_as.json()["score"] == 1.0
            and "script-src 'self'" in kept_as.headers["content-security-policy"]
        )
        other = page.post("/api/feedback", json=given | {"thumb": "down"})
        assert other.status_code == 409 and "which stays" in other.json()["detail"]
        for name in ("../models", "a/b", ""):
            assert page.post("/api/feedback", json=given | {"answer_id": name}).status_code == 422
    (recording,) = kept(folder).values()
    assert recording.feedback is not None and recording.feedback.score == 1.0


@pytest.mark.slow
def test_feedback_is_kept_once_and_from_the_owner_only(recorded: AgentServer, folder: Path) -> None:
    answer_id = respond(recorded).json()["id"]
    path = f"/v1/responses/{answer_id}/feedback"
    assert code_of(send(recorded, "GET", path)) == (404, "feedback_not_found")
    assert code_of(judge(recorded, answer_id, {"thumb": "down"}, BOB)) == (404, "recording_not_found")
    given = judge(recorded, answer_id, {"score": 0.5, "comment": "Right, but slow."})
    assert given.status_code == 200 and given.json()["readers"] == ["training"]
    assert code_of(judge(recorded, answer_id, {"thumb": "down"})) == (409, "feedback_exists")
    again = judge(recorded, answer_id, {"score": 0.5, "comment": "Right, but slow."})
    assert send(recorded, "GET", path).json() == given.json() == again.json()
    assert send(recorded, "GET", path, key=BOB).status_code == 404
    found = kept(folder)[answer_id].feedback
    assert found is not None and (found.score, found.comment) == (0.5, "Right, but slow.")


@pytest.mark.slow
def test_thumbs_are_scores_on_answers_of_chats(recorded: AgentServer, folder: Path) -> None:
    ids = [chat(recorded).json()["id"] for _ in range(2)]
    for answer_id, thumb in zip(ids, ("up", "down"), strict=True):
        assert judge(recorded, answer_id, {"thumb": thumb}).status_code == 200
    found = [kept(folder)[each].feedback for each in ids]
    assert [each and each.score for each in found] == [1.0, -1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "either a score"),
        ({"score": 1, "thumb": "up"}, "either a score"),
        ({"score": 1.5}, "score"),
        ({"score": "NaN"}, "score"),
        ({"score": False}, "score"),
        ({"thumb": "sideways"}, "thumb"),
        ({"thumb": "up", "comment": "x" * (MAX_COMMENT + 1)}, "comment"),
        ({"thumb": "up", "stars": 5}, "stars"),
    ],
)
def test_bad_feedback_is_an_error_that_names_its_field(
    recorded: AgentServer, folder: Path, body: Any, part: str
) -> None:
    answer_id = chat(recorded).json()["id"]
    answer = judge(recorded, answer_id, body)
    assert answer.status_code == 400 and part in answer.json()["error"]["message"]
    assert kept(folder)[answer_id].feedback is None


@pytest.mark.slow
@pytest.mark.parametrize("answer_id", ["resp_0", "chatcmpl-" + "0" * 32, "..%2Frecordings", "%2e%2e"])
def test_unknown_ids_name_no_file(recorded: AgentServer, answer_id: str) -> None:
    assert judge(recorded, answer_id, {"thumb": "up"}).status_code == 404
    assert send(recorded, "DELETE", f"/v1/responses/{answer_id}/recording").status_code == 404


@pytest.mark.slow
def test_client_keeps_an_answer_and_what_follows_out(recorded: AgentServer, folder: Path) -> None:
    opted_out = respond(recorded, {"X-Troupe-Record": "no"})
    assert opted_out.headers["x-troupe-recorded"] == "no" and opted_out.json()["recorded"] is False
    after = respond(recorded, previous_response_id=opted_out.json()["id"])
    assert after.headers["x-troupe-recorded"] == "no"
    assert kept(folder) == {}
    assert code_of(judge(recorded, after.json()["id"], {"thumb": "up"})) == (404, "recording_not_found")
    error = respond(recorded, {"X-Troupe-Record": "perhaps"})
    assert error.status_code == 400 and "'perhaps': send yes or no" in error.json()["error"]["message"]


@pytest.mark.slow
def test_feedback_from_the_middle_of_a_conversation(recorded: AgentServer, folder: Path) -> None:
    ids = [respond(recorded).json()["id"]]
    for _ in range(2):
        ids.append(respond(recorded, previous_response_id=ids[-1]).json()["id"])
    send(recorded, "DELETE", f"/v1/responses/{ids[-1]}")  # the conversation has ended
    assert judge(recorded, ids[1], {"thumb": "up"}).status_code == 200
    recordings = kept(folder)
    assert [recordings[each].answer.after for each in ids] == [None, *ids[:2]]
    assert [recordings[each].feedback is not None for each in ids] == [False, True, False]


@pytest.mark.slow
def test_deletion_reaches_later_answers_and_names_readings(recorded: AgentServer, folder: Path) -> None:
    other = respond(recorded).json()["id"]
    first = respond(recorded).json()["id"]
    second = respond(recorded, previous_response_id=first).json()["id"]
    judge(recorded, second, {"thumb": "up"})
    assert set(kept(folder)) == {other, first, second}
    assert [each.answer.answer_id for each in read_recordings(folder)] == [second]
    path = f"/v1/responses/{first}/recording"
    assert send(recorded, "DELETE", path, key=BOB).status_code == 404
    deletion = send(recorded, "DELETE", path).json()
    assert deletion["deleted"] == [first, second]
    (reading,) = deletion["read_before_by"]
    assert (reading["reader"], reading["answers"]) == ("training", 1)
    assert set(kept(folder)) == {other}
    assert send(recorded, "DELETE", path).status_code == 404
    left = b"".join(path.read_bytes() for path in (folder / "answers").iterdir())
    assert first.encode() not in left and second.encode() not in left
    third = respond(recorded, previous_response_id=second)
    assert third.status_code == 200 and third.headers["x-troupe-recorded"] == "no"


def test_old_answers_take_no_feedback_and_are_not_read(recorded: AgentServer, folder: Path) -> None:
    ids = [respond(recorded).json()["id"] for _ in range(2)]
    assert judge(recorded, ids[1], {"thumb": "up"}).status_code == 200
    before = time.time() - 31 * DAY_SECONDS
    for answer_id in ids:
        os.utime(folder / "answers" / f"{answer_id}.json", (before, before))
    assert judge(recorded, ids[0], {"thumb": "up"}).status_code == 404
    assert read_recordings(folder) == []


@pytest.mark.slow
def test_answers_outlive_their_server(tokenizer_folder: Path, folder: Path) -> None:
    recording = RecordingConfig(folder=str(folder))
    with agent_server(tokenizer_folder, KEYS, recording=recording) as server:
        answer_id = respond(server).json()["id"]
    with agent_server(tokenizer_folder, KEYS, recording=recording) as server:
        assert judge(server, answer_id, {"thumb": "up"}).status_code == 200


@contextmanager
def dying_server(folder: Path, model: Path, moment: str) -> Iterator[Any]:
    """A server in a process of its own, which is gone by SIGKILL at the end of the block."""
    command = [sys.executable, "-c", DYING_SERVER, str(folder), str(model), moment]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield SimpleNamespace(url=process.stdout.readline().strip())
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_feedback_counts_once_whenever_the_server_is_killed(tokenizer_folder: Path, folder: Path) -> None:
    """Its client sends it again after each answer that has not come."""
    with dying_server(folder, tokenizer_folder, "before") as server:
        answer_id = respond(server).json()["id"]
        with pytest.raises(httpx.TransportError):
            judge(server, answer_id, {"score": 0.5})
    assert kept(folder)[answer_id].feedback is None
    with dying_server(folder, tokenizer_folder, "after") as server, pytest.raises(httpx.TransportError):
        judge(server, answer_id, {"score": 0.5})
    with agent_server(tokenizer_folder, KEYS, recording=RecordingConfig(folder=str(folder))) as server:
        assert judge(server, answer_id, {"score": 0.5}).json()["score"] == 0.5
        assert code_of(judge(server, answer_id, {"score": 0.75})) == (409, "feedback_exists")
    (recording,) = kept(folder).values()
    assert recording.feedback is not None and recording.feedback.score == 0.5


def test_repeated_request_has_one_recording(recorded: AgentServer, folder: Path) -> None:
    key = {"Idempotency-Key": "once"}
    answers = [respond(recorded, key) for _ in range(2)]
    assert [each.headers["x-troupe-recorded"] for each in answers] == ["yes"] * 2
    assert set(kept(folder)) == {each.json()["id"] for each in answers}


def test_answer_goes_out_where_its_recording_fails(recorded: AgentServer, folder: Path) -> None:
    os.rename(folder / "answers", folder / "gone")
    answer = respond(recorded)
    assert answer.status_code == 200 and answer.headers["x-troupe-recorded"] == "no"
    end = respond(recorded, stream=True).text.split("event: response.completed")[1]
    assert '"recorded": false' in end


@pytest.mark.parametrize("model", ["tiny", AGENT])
def test_answer_goes_out_where_the_one_before_cannot_be_found(
    recorded: AgentServer, folder: Path, model: str
) -> None:
    earlier = respond(recorded, model=model).json()["id"]
    os.rename(folder / "answers", folder / "gone")
    (folder / "answers").touch()  # no folder: the disk gives an error for each file in it
    answer = respond(recorded, model=model, previous_response_id=earlier)
    assert answer.status_code == 200 and answer.headers["x-troupe-recorded"] == "no"


def test_server_without_a_folder_says_so(locked: AgentServer) -> None:
    answer = respond(locked)
    assert "x-troupe-recorded" not in answer.headers and "recorded" not in answer.json()
    assert code_of(judge(locked, answer.json()["id"], {"thumb": "up"})) == (404, "recording_off")


@pytest.mark.parametrize("stream", [False, True])
def test_answer_of_the_policy_is_recorded(recorded: AgentServer, folder: Path, stream: bool) -> None:
    answer = chat(recorded, model="tiny", seed=1, return_token_ids=not stream, stream=stream)
    assert answer.headers["x-troupe-recorded"] == "yes"
    (recording,) = kept(folder).values()
    (step,) = recording.trajectory.steps
    (completion,) = recording.trajectory.completions
    assert recording.answer.answer_id in answer.text and recording.answer.model == "tiny"
    assert step.chat_completions[0] == {"role": "user", "content": "Say hi"}
    assert step.chat_completions[1:] == [{"role": "assistant", "content": completion.text}]
    assert len(completion.logprobs) == len(completion.completion_ids) > 0
    if not stream:
        (choice,) = answer.json()["choices"]
        assert list(completion.completion_ids) == choice["token_ids"]
        assert list(completion.prompt_ids) == answer.json()["prompt_token_ids"]
        assert list(completion.token_versions) == choice["token_versions"]
        assert completion.text == choice["message"]["content"]
    assert judge(recorded, recording.answer.answer_id, {"thumb": "up"}).status_code == 200


DIALECTS = {
    "responses": {"input": "Say hi"},
    "messages": {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 9},
}


def ask(server: AgentServer, path: str, headers: Headers | None = None, **fields: Any) -> httpx.Response:
    """The policy's answer in one of Responses and Anthropic's messages."""
    return send(server, "POST", f"/v1/{path}", {"model": "tiny", **DIALECTS[path], **fields}, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prefix"), [("responses", "resp_"), ("messages", "msg_")])
def test_answer_of_the_policy_is_recorded_in_other_dialects(
    recorded: AgentServer, folder: Path, path: str, prefix: str, stream: bool
) -> None:
    answer = ask(recorded, path, stream=stream)
    assert answer.headers["x-troupe-recorded"] == "yes"
    if stream:
        events = [json.loads(line) for line in re.findall(r"data: ({.*)", answer.text)]
        found = [each.get("recorded", each.get("response", {}).get("recorded")) for each in events]
        assert found[0] is True and [each for each in found if each is not None][-1] is True
    else:
        assert answer.json()["recorded"] is True
    (recording,) = kept(folder).values()
    (completion,) = recording.trajectory.completions
    answer_id = recording.answer.answer_id
    assert answer_id.startswith(prefix) and answer_id in answer.text
    assert len(completion.logprobs) == len(completion.completion_ids) > 0
    assert judge(recorded, answer_id, {"thumb": "up"}).status_code == 200
    kept_out = ask(recorded, path, {"X-Troupe-Record": "no"}, stream=stream)
    assert kept_out.headers["x-troupe-recorded"] == "no" and len(kept(folder)) == 1


@pytest.mark.slow
def test_response_of_the_policy_follows_only_what_is_recorded(recorded: AgentServer, folder: Path) -> None:
    def after(earlier: httpx.Response) -> httpx.Response:
        return ask(recorded, "responses", previous_response_id=earlier.json()["id"])

    secret = ask(recorded, "responses", {"X-Troupe-Record": "no"})
    reply = after(secret)
    assert (reply.status_code, reply.json()["recorded"], kept(folder)) == (200, False, {})
    first = ask(recorded, "responses")
    second, third = after(first), after(first)
    assert [each.json()["recorded"] for each in (second, third)] == [True, True]
    path = f"/v1/responses/{first.json()['id']}/recording"
    assert len(send(recorded, "DELETE", path).json()["deleted"]) == 3
    assert after(second).json()["recorded"] is False and kept(folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"n": 2}, {"headers": {"X-Troupe-Record": "no"}}])
def test_answers_of_the_policy_that_stay_out(
    recorded: AgentServer, folder: Path, fields: dict[str, Any]
) -> None:
    answer = chat(recorded, model="tiny", **fields)
    assert answer.headers["x-troupe-recorded"] == "no" and answer.json()["recorded"] is False
    assert kept(folder) == {}


def message_of_a2a(server: AgentServer, key: str = ALICE, **fields: Any) -> Any:
    """The answer to a message of A2A over REST."""
    message = {"role": "ROLE_USER", "messageId": "1", "parts": [{"text": "Say hi"}], **fields}
    path = "/a2a/calculator/message:send"
    return send(server, "POST", path, {"message": message}, key, {"A2A-Version": "1.0"}).json()


@pytest.mark.slow
def test_message_of_a2a_has_feedback_on_the_answer_before(recorded: AgentServer, folder: Path) -> None:
    answer_id = message_of_a2a(recorded)["task"]["metadata"]["answer_id"]
    given = {"feedback": {"answer_id": answer_id, "thumb": "down", "comment": "No."}}
    assert "has no recorded answer" in str(message_of_a2a(recorded, BOB, metadata=given)["error"])
    assert "task" in message_of_a2a(recorded, metadata=given)
    found = kept(folder)[answer_id].feedback
    assert found is not None and (found.score, found.comment) == (-1.0, "No.")
    assert "task" in message_of_a2a(recorded, metadata=given), "the answer was lost: the same comes again"
    for wrong in ("up", {"answer_id": answer_id}, {"answer_id": answer_id, "thumb": "up"}):
        assert "message.metadata.feedback" in str(message_of_a2a(recorded, metadata={"feedback": wrong}))
    assert "message.metadata: " in str(message_of_a2a(recorded, metadata={"score": math.nan})["error"])
    assert len(kept(folder)) == 3, "a message with feedback that is refused is not played"


@pytest.mark.parametrize("word", ["yes", "no"])
def test_task_of_a2a_names_its_answer(recorded: AgentServer, folder: Path, word: str) -> None:
    message = {"role": "ROLE_USER", "messageId": "1", "parts": [{"text": "Say hi"}]}
    headers = {"A2A-Version": "1.0", "X-Troupe-Record": word}
    path = "/a2a/calculator/message:send"
    answer = send(recorded, "POST", path, {"message": message}, headers=headers).json()
    metadata = answer["task"]["metadata"]
    assert metadata["recorded"] is (word == "yes")
    status = judge(recorded, metadata["answer_id"], {"thumb": "up"}).status_code
    assert (status, len(kept(folder))) == ((200, 1) if word == "yes" else (404, 0))
