"""A session of the gateway: what is remembered from one call to the next changes nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from policies.gateway.calls import policy_call
from policies.gateway.session import PlacedCall, PolicyCall, Session
from policies.model_api.dialects.base import Chat, ChatReader
from policies.model_api.dialects.messages import Messages
from policies.model_api.dialects.responses import Responses
from policies.model_api.errors import InvalidRequestError

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def conversation(rng: random.Random) -> list[list[dict[str, Any]]]:
    """The messages of a program's calls, as it goes on, is cut and is edited."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    calls = []
    for _ in range(12):
        if rng.random() < 0.2:
            del messages[rng.randrange(1, len(messages) + 1) :]
        if rng.random() < 0.2:
            messages[rng.randrange(len(messages))]["content"] = rng.choice(["s", "edited", "answer"])
        messages.append({"role": "user", "content": rng.choice(["a", "b"])})
        calls.append(copy.deepcopy(messages))
        answer = {"role": "assistant", "content": rng.choice(["answer", " answer", "other"])}
        messages.append(answer | ({"tool_calls": [copy.deepcopy(CALL)]} if rng.random() < 0.3 else {}))
    return calls


def placed(calls: list[PolicyCall]) -> list[PlacedCall]:
    session, found = Session(), []
    for call in calls:
        found.append(session.place(call))
        session.answer("answer", {"role": "assistant", "content": "answer"})
    return found


@pytest.mark.parametrize("seed", range(50))
def test_remembered_messages_leave_the_tree_as_it_is(seed: int) -> None:
    bodies = [{"model": "m", "messages": each, "tools": [TOOL]} for each in conversation(random.Random(seed))]
    reader = ChatReader()
    remembered = [policy_call(reader.read(copy.deepcopy(body))) for body in bodies]
    anew = [policy_call(Chat(body).chat_request()) for body in bodies]
    assert remembered == anew
    assert placed(remembered) == placed(anew)


def test_message_that_was_read_is_not_read_again() -> None:
    reader, message = ChatReader(), {"role": "user", "content": "a"}
    (first,) = reader.read({"model": "m", "messages": [dict(message)]}).messages
    second = reader.read({"model": "m", "messages": [dict(message), dict(message)]}).messages
    assert second[0] is first
    assert second[1] is not first


@pytest.mark.parametrize(("dialect", "name"), [(Messages, "messages"), (Responses, "input")])
def test_every_dialect_reads_only_new_messages(dialect: Any, name: str) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    chats = ChatReader()
    limit = {"max_tokens": 9} if dialect is Messages else {}
    bodies: list[Any] = [{"model": "m", **limit, name: turns[:number]} for number in (1, 3)]
    first, second = (dialect(body, chats).chat_request() for body in bodies)
    assert second.messages[0] is first.messages[0]
    assert second == dialect(bodies[1]).chat_request()


@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "m", "messages": []}, [], "messages", None])
def test_body_that_is_no_chat_is_named_as_before(body: Any) -> None:
    reader = ChatReader()
    reader.read({"model": "m", "messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(InvalidRequestError) as anew:
        Chat(body)
    with pytest.raises(InvalidRequestError) as remembered:
        reader.read(body)
    assert str(remembered.value) == str(anew.value)


def test_new_message_that_cannot_be_read_is_named_by_its_place() -> None:
    reader = ChatReader()
    messages: list[Any] = [{"role": "user", "content": "a"}]
    reader.read({"model": "m", "messages": messages})
    with pytest.raises(InvalidRequestError, match=r"messages\W+1"):
        reader.read({"model": "m", "messages": [*messages, {"role": "user"}]})
