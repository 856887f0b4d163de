"""Conversations over HTTP with the official client: who goes on with what, and what is asked of the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from agent_server import AGENT, ALICE, BOB, KEYS, AgentServer, agent_server
from machine import wait_until
from shown_programs import CONVERSATION

from actors.settings import AgentsConfig
from environments import SingleTurnEnvironment
from environments.types import StepEvent

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI


def client(server: AgentServer, key: str = "none") -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(server: AgentServer, key: str = "none", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": AGENT, "input": "Say hi", **fields}
    return client(server, key).responses.create(extra_headers=headers, **body)


def chat(server: AgentServer, session: str, key: str = "none", messages: Any = None) -> Any:
    messages = messages or [{"role": "user", "content": "Say hi"}]
    headers = {"X-Session-Id": session}
    return client(server, key).chat.completions.create(model=AGENT, messages=messages, extra_headers=headers)


def error_of(call: Callable[[], Any]) -> APIStatusError:
    from openai import APIStatusError

    with pytest.raises(APIStatusError) as raised:
        call()
    return raised.value


def followed(server: AgentServer) -> list[int | None]:
    """Of each message the number of the one that it goes on from."""
    numbers = {request.rollout_id: number for number, request in enumerate(server.service.asked)}
    follow_ups = [request.follow_up for request in server.service.asked]
    return [None if each is None else numbers[each.after] for each in follow_ups]


@pytest.mark.slow
def test_message_goes_on_from_the_response_that_it_names(server: AgentServer) -> None:
    first = ask(server)
    second = ask(server, input="And now?", previous_response_id=first.id)
    ask(server, input=[{"role": "user", "content": "Again?"}], previous_response_id=second.id)
    assert second.previous_response_id == first.id and second.output_text == "46"
    assert followed(server) == [None, 0, 1]
    asked = server.service.asked[1]
    assert asked.follow_up is not None and asked.follow_up.message == "And now?"
    assert asked.keep_seconds == AgentsConfig().keep_seconds


def test_program_of_the_readme_talks_on(server: AgentServer) -> None:
    exec(CONVERSATION.replace("http://127.0.0.1:8000", server.url))
    assert followed(server) == [None, 0]


@pytest.mark.parametrize("why", ["unknown", "deleted", "store=false"])
def test_response_that_is_not_there_cannot_be_followed(server: AgentServer, why: str) -> None:
    response_id = "resp_unknown" if why == "unknown" else ask(server, store=why != "store=false").id
    if why == "deleted":
        client(server).responses.delete(response_id)
    error = error_of(lambda: ask(server, previous_response_id=response_id))
    assert (error.status_code, error.code) == (400, "previous_response_not_found")
    assert error.param == "previous_response_id" and response_id in error.message


def said(server: AgentServer, *texts: str, key: str = "none", **fields: Any) -> Any:
    """The answer to all that was said, by the user and the agent in turns, as chat clients send it."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return client(server, key).chat.completions.create(model=AGENT, messages=messages, **fields)


def test_conversation_is_found_by_what_was_said(server: AgentServer) -> None:
    said(server, "One")
    said(server, "Other")
    said(server, "One", " 46\n", "Two")
    said(server, "One", "46", "Two", "<think>I know</think>46", "Three")
    said(server, "Other", "46", "Two")
    ask(
        server,
        input=[
            {"role": "user", "content": "Other"},
            {"role": "assistant", "content": "46"},
            {"role": "user", "content": "Three"},
        ],
    )
    assert followed(server)[:5] == [None, None, 0, 2, 1]
    tasks = [request.task for request in server.service.asked]
    assert tasks[3] == {"message": "Three"}


def test_conversations_in_which_the_same_was_said_do_not_meet(server: AgentServer) -> None:
    for _ in range(3):
        said(server, "Hi")
    for _ in range(3):
        said(server, "Hi", "46", "Bye")
    assert followed(server)[:3] == [None] * 3 and sorted(followed(server)[3:]) == [0, 1, 2]


@pytest.mark.slow
def test_history_that_the_server_does_not_know_is_an_error(locked: AgentServer) -> None:
    assert said(locked, "Hi", key=ALICE).choices[0].message.content == "46"
    assert said(locked, "Hi", "46", "Bye", key=ALICE).choices[0].message.content == "46"
    for texts, key in ((("Hi", "46", "Bye"), BOB), (("Hi", "I never said that", "Bye"), ALICE)):
        error = error_of(lambda texts=texts, key=key: said(locked, *texts, key=key))
        assert (error.status_code, error.code) == (409, "conversation_lost")
    error = error_of(lambda: said(locked, "Hi", "46", key=ALICE))
    assert error.status_code == 400 and "send a user message" in error.message


def test_most_tokens_of_an_answer_are_an_upper_bound(server: AgentServer) -> None:
    ask(server, max_output_tokens=30)
    said(server, "Hi", max_tokens=20)
    said(server, "Hi")
    assert [request.max_response_tokens for request in server.service.asked] == [30, 20, None]
    assert {request.params.max_tokens for request in server.service.asked} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["reject", "ignore", "prepend"])
def test_who_serves_says_what_becomes_of_a_system_prompt(
    tokenizer_folder: Path,
    instructions: str,
) -> None:
    with agent_server(tokenizer_folder, instructions=instructions) as server:
        order: Any = {"role": "system", "content": "Be brief."}
        talk: Any = [order, {"role": "user", "content": "Hi"}]
        create = client(server).chat.completions.create
        if instructions == "reject":
            error = error_of(lambda: create(model=AGENT, messages=talk))
            assert error.status_code == 400 and "server.agents.instructions" in error.message
            assert error_of(lambda: ask(server, instructions="Be brief.")).param == "input"
            assert ask(server, instructions="").output_text == "46"
            return
        create(model=AGENT, messages=talk)
        answer: Any = {"role": "assistant", "content": "46"}
        create(model=AGENT, messages=[*talk, answer, {"role": "user", "content": "Bye"}])
        ask(server, instructions="Be brief.")
        first = {"ignore": "Hi", "prepend": "Be brief.\n\nHi"}[instructions]
        assert [list(request.task.values()) for request in server.service.asked[:2]] == [[first], ["Bye"]]
        assert followed(server) == [None, 0, None]


@pytest.mark.slow
def test_deleting_the_newest_response_closes_its_environment(server: AgentServer) -> None:
    first = ask(server)
    second = ask(server, previous_response_id=first.id)
    client(server).responses.delete(first.id)
    assert server.service.forgotten == []
    client(server).responses.delete(second.id)
    assert server.service.forgotten == [server.service.asked[1].rollout_id]


@pytest.mark.slow
def test_two_ways_to_go_on_from_response_are_closed_on_their_own(server: AgentServer) -> None:
    first = ask(server)
    ways = [ask(server, previous_response_id=first.id) for _ in range(2)]
    assert followed(server) == [None, 0, 0]
    for way in ways:
        client(server).responses.delete(way.id)
    assert server.service.forgotten == [request.rollout_id for request in server.service.asked[1:]]


@pytest.mark.slow
def test_session_goes_on_with_its_last_message_alone(server: AgentServer) -> None:
    chat(server, "a")
    chat(server, "b")
    turns = [
        {"role": "user", "content": "Say hi"},
        {"role": "assistant", "content": "46"},
        {"role": "user", "content": "And now?"},
    ]
    chat(server, "a", messages=turns)
    ask(server, headers={"X-Session-Id": "a"}, input="At another endpoint")
    assert followed(server) == [None, None, 0, 2]
    messages = [request.follow_up.message for request in server.service.asked if request.follow_up]
    assert messages == ["And now?", "At another endpoint"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda server: chat(server, "x", messages=[{"role": "assistant", "content": "46"}]), "user message"),
        (lambda server: chat(server, "x" * 300), "300 characters"),
        (
            lambda server: ask(server, headers={"X-Session-Id": "x"}, previous_response_id="resp_1"),
            "send one",
        ),
    ],
)
def test_what_is_no_next_message_is_an_error(server: AgentServer, call: Any, said: str) -> None:
    error = error_of(lambda: call(server))
    assert error.status_code == 400 and said in error.message


@pytest.mark.slow
def test_session_unknown_with_earlier_turns_is_no_new_one(
    server: AgentServer,
) -> None:
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    error = error_of(lambda: chat(server, "forgotten", messages=turns))
    assert (error.status_code, error.code) == (409, "conversation_lost")
    assert "no message of this session" in error.message and server.service.asked == []
    chat(server, "forgotten")
    chat(server, "forgotten", messages=turns)
    assert followed(server) == [None, 0]


@pytest.mark.slow
def test_closed_session_begins_anew(server: AgentServer) -> None:
    chat(server, "closed")
    url = f"{server.url}/v1/sessions/closed"
    assert httpx.delete(url).json() == {"id": "closed", "object": "session.deleted", "deleted": True}
    assert server.service.forgotten == [server.service.asked[0].rollout_id]
    again = httpx.delete(url)
    assert again.status_code == 404 and again.json()["error"]["code"] == "session_not_found"
    chat(server, "closed")
    assert followed(server) == [None, None]


@pytest.mark.slow
def test_conversation_belongs_to_its_key(tokenizer_folder: Path) -> None:
    with agent_server(tokenizer_folder, KEYS) as server:
        response = ask(server, ALICE)
        for call in (
            lambda: ask(server, BOB, previous_response_id=response.id),
            lambda: client(server, BOB).responses.retrieve(response.id),
            lambda: client(server, BOB).responses.delete(response.id),
        ):
            assert error_of(call).status_code in (400, 404)
        chat(server, "shared", ALICE)
        chat(server, "shared", BOB)
        closed = httpx.delete(f"{server.url}/v1/sessions/shared", headers={"authorization": f"Bearer {BOB}"})
        chat(server, "shared", ALICE)
        assert closed.status_code == 200 and client(server, ALICE).responses.retrieve(response.id)
        assert followed(server) == [None, None, None, 1]
        repeated = [ask(server, key, {"Idempotency-Key": "1"}).id for key in (ALICE, BOB)]
        assert len(set(repeated)) == 2


def test_environment_without_follow_up_says_what_to_write(tokenizer_folder: Path) -> None:
    with agent_server(tokenizer_folder, env_class=SingleTurnEnvironment) as server:
        response = ask(server)
        for call in (lambda: ask(server, previous_response_id=response.id), lambda: chat(server, "a")):
            error = error_of(call)
            assert (error.status_code, error.code) == (400, "follow_up_not_supported")
            assert "SingleTurnEnvironment.follow_up(message)" in error.message
        assert [request.keep_seconds for request in server.service.asked] == [None]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_second_message_at_once_is_rejected(server: AgentServer, threads: ThreadPoolExecutor) -> None:
    server.service.is_busy = True
    first = threads.submit(chat, server, "busy")
    wait_until(lambda: server.service.waiting)
    error = error_of(lambda: chat(server, "busy"))
    assert (error.status_code, error.code) == (409, "conversation_busy")
    assert "server.agents.second_message=wait" in error.message
    assert error.response.headers["retry-after"] == "1"
    assert httpx.delete(f"{server.url}/v1/sessions/busy").status_code == 409
    server.service.finish(server.service.take())
    assert first.result().choices[0].message.content == "46"


@pytest.mark.slow
def test_second_message_at_once_waits_where_that_is_set(
    tokenizer_folder: Path,
    threads: ThreadPoolExecutor,
) -> None:
    with agent_server(tokenizer_folder, settings=AgentsConfig(second_message="wait")) as server:
        server.service.is_busy = True
        first = threads.submit(chat, server, "a")
        wait_until(lambda: server.service.waiting)
        second = threads.submit(chat, server, "a")
        server.service.finish(server.service.take())
        first.result()
        wait_until(lambda: server.service.waiting)
        assert followed(server) == [None, 0]
        server.service.finish(server.service.take())
        second.result()


@pytest.mark.slow
def test_response_under_way_is_cancelled_by_its_key(
    tokenizer_folder: Path,
    threads: ThreadPoolExecutor,
) -> None:
    from openai import APIError

    with agent_server(tokenizer_folder, KEYS) as server:
        server.service.is_busy = True
        asked = threads.submit(ask, server, ALICE, {"X-Session-Id": "a"}, stream=True)
        wait_until(lambda: server.service.waiting)
        server.on_step(server.service.asked[0].rollout_id, StepEvent(index=0, text="12+34", observation="46"))
        events = iter(asked.result())
        response_id = next(events).response.id
        cancel = client(server, ALICE).responses.cancel
        assert error_of(lambda: client(server, BOB).responses.cancel(response_id)).status_code == 404
        assert cancel(response_id).status == "cancelled"
        with pytest.raises(APIError) as raised:
            list(events)
        assert raised.value.code == "withdrawn"
        wait_until(lambda: not server.service.waiting)
        assert error_of(lambda: cancel(response_id)).status_code == 404
        server.service.is_busy = False
        chat(server, "a", ALICE)
        assert followed(server) == [None, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {"input": "Say hi"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Say hi"}]}),
    ],
)
def test_request_with_the_same_idempotency_key_is_played_once(
    server: AgentServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {"model": AGENT, "stream": stream, **body}
    url, headers = f"{server.url}/v1/{path}", {"Idempotency-Key": f"once-{path}-{stream}"}
    first, again = (httpx.post(url, json=body, headers=headers).text for _ in range(2))
    assert again == first and len(server.service.asked) == 1
    other = httpx.post(url, json=body | {"temperature": 0.5}, headers=headers)
    assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_key_reused"


def test_repeated_request_does_not_bring_back_deleted_response(server: AgentServer) -> None:
    headers = {"Idempotency-Key": "deleted"}
    response = ask(server, headers=headers)
    client(server).responses.delete(response.id)
    assert ask(server, headers=headers).id == response.id and len(server.service.asked) == 1
    assert error_of(lambda: client(server).responses.retrieve(response.id)).status_code == 404


@pytest.mark.slow
def test_episode_under_way_is_shared_and_outlives_its_client(
    server: AgentServer, threads: ThreadPoolExecutor
) -> None:
    server.service.is_busy = True
    headers, body = {"Idempotency-Key": "shared"}, {"model": AGENT, "input": "Say hi"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=0.5)
    others = [threads.submit(ask, server, headers=headers) for _ in range(2)]
    threading.Event().wait(0.3)
    assert len(server.service.waiting) == len(server.service.asked) == 1
    server.service.finish(server.service.take())
    assert len({other.result().id for other in others}) == 1


def test_failed_request_can_be_repeated_with_its_key(
    server: AgentServer, threads: ThreadPoolExecutor
) -> None:
    server.service.is_busy = True
    headers = {"Idempotency-Key": "failed"}
    first = threads.submit(ask, server, headers=headers)
    wait_until(lambda: server.service.waiting)
    server.service.fail(server.service.take(), "it broke")
    assert error_of(first.result).status_code == 500
    server.service.is_busy = False
    assert ask(server, headers=headers).output_text == "46"


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that keys have paid for."""
    numbers: list[int] = []
    monkeypatch.setattr(
        "actors.serving.access.Caller.charge_tokens", lambda self, number: numbers.append(number)
    )
    return numbers


def test_repeated_answer_costs_no_tokens(server: AgentServer, charged: list[int]) -> None:
    for _ in range(2):
        ask(server, headers={"Idempotency-Key": "costs"})
    assert charged == [11]


def hear_steps(server: AgentServer, *steps: tuple[int, str, int]) -> None:
    """Tell the steps of the newest episode: their index, text and tokens."""
    wait_until(lambda: server.service.waiting)
    for index, text, num_tokens in steps:
        step = StepEvent(index=index, text=text, observation="46", num_tokens=num_tokens)
        server.on_step(server.service.asked[-1].rollout_id, step)


def hang_up(server: AgentServer, threads: ThreadPoolExecutor, num_tokens: int, **request: Any) -> str:
    """Ask for a stream, hear a step of so many tokens, and hang up; return the id of the response."""
    server.service.is_busy = True
    asked = threads.submit(ask, server, stream=True, **request)
    hear_steps(server, (0, "12+34", num_tokens))
    stream = asked.result()
    response_id = next(iter(stream)).response.id
    stream.close()
    return str(response_id)


def test_client_that_hangs_up_pays_for_steps_that_were_played(
    server: AgentServer, charged: list[int], threads: ThreadPoolExecutor
) -> None:
    hang_up(server, threads, 9)
    wait_until(lambda: not server.service.waiting)
    assert charged == [9]


def test_repeated_request_of_a_gone_client_pays_for_the_rest(
    server: AgentServer, charged: list[int], threads: ThreadPoolExecutor
) -> None:
    headers = {"Idempotency-Key": "hung up"}
    hang_up(server, threads, 4, headers=headers)
    wait_until(lambda: charged == [4])
    server.service.finish(server.service.take())
    list(ask(server, headers=headers, stream=True))
    assert charged == [4, 7]


def test_repeated_request_of_a_gone_client_owns_its_response(
    server: AgentServer, charged: list[int], threads: ThreadPoolExecutor
) -> None:
    headers = {"Idempotency-Key": "gone"}
    response_id = hang_up(server, threads, 4, headers=headers)
    wait_until(lambda: charged == [4])
    server.service.finish(server.service.take())
    *_, end = ask(server, headers=headers, stream=True)
    assert end.response.id == response_id
    assert client(server).responses.retrieve(response_id).output_text == "46"
    client(server).responses.delete(response_id)
    assert list(ask(server, headers=headers, stream=True))[-1].response.id == response_id
    assert error_of(lambda: client(server).responses.retrieve(response_id)).status_code == 404


def test_whole_answer_costs_its_usage_also_where_try_has_failed(
    server: AgentServer, charged: list[int], threads: ThreadPoolExecutor
) -> None:
    server.service.is_busy = True
    asked = threads.submit(ask, server)
    hear_steps(server, (0, "12+34", 4), (1, "lost", 30), (0, "12+34", 4))
    server.service.finish(server.service.take())
    assert asked.result().usage.total_tokens == sum(charged) == 11


def test_stream_has_the_steps_of_a_begun_or_resumed_episode_once(
    server: AgentServer, threads: ThreadPoolExecutor
) -> None:
    server.service.is_busy = True
    asked = threads.submit(ask, server, stream=True)
    hear_steps(server, (0, "a", 1), (1, "b", 1), (0, "a", 1), (1, "c", 1))
    server.service.finish(server.service.take())
    *_, end = asked.result()
    texts = [item.summary[0].text.split()[0] for item in end.response.output if item.type == "reasoning"]
    assert texts == ["a", "b", "c"] and end.response.output_text == "46"


@pytest.mark.slow
def test_chunk_says_which_step_it_replaces(server: AgentServer, threads: ThreadPoolExecutor) -> None:
    server.service.is_busy = True
    messages = [{"role": "user", "content": "Say hi"}]
    create = client(server).chat.completions.create
    asked = threads.submit(create, model=AGENT, messages=messages, stream=True)
    hear_steps(server, (0, "a", 1), (1, "b", 1), (0, "c", 1), (1, "d", 1))
    server.service.finish(server.service.take())
    steps = [chunk.model_extra["step"] for chunk in asked.result() if "step" in chunk.model_extra]
    assert [(step["number"], step["text"]) for step in steps] == [(1, "a"), (2, "b"), (1, "c"), (2, "d")]
