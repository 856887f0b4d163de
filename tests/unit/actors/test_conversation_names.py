"""Which conversations are kept by their names, and which are forgotten: by key, and not under way."""

from __future__ import annotations

import asyncio

import pytest

from actors.served_agents.conversations import Conversations
from policies.agent_api.context import RequestContext
from policies.agent_api.frontend import digest
from policies.agent_api.history import BEGINNING, history_of
from policies.agent_api.question import Question
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError
from policies.model_api.protocol import ChatRequest


def stored(owner: str, number: int) -> RequestContext:
    return RequestContext(owner=owner, answer_id=f"resp_{number}", can_be_followed=True)


def test_conversations_of_one_key_push_out_none_of_another() -> None:
    kept = Conversations(waits=False, most=3)
    of_bob = kept.find(RequestContext(owner="bob", session="support")).conversation
    kept.advance(of_bob, "00000001/0000", RequestContext(owner="bob", session="support"))
    for number in range(10):
        alone = kept.find(RequestContext(owner="alice")).conversation
        kept.advance(alone, f"{number}", stored("alice", number))
    assert kept.find(RequestContext(owner="bob", session="support")).conversation is of_bob
    assert kept.find(RequestContext(owner="alice", after="resp_9")).rollout_id == "9"
    with pytest.raises(RequestError, match="forgotten after 3 newer ones"):
        kept.find(RequestContext(owner="alice", after="resp_6"))


def test_messages_without_a_session_push_out_no_session() -> None:
    kept = Conversations(waits=False, most=2)
    session = RequestContext(session="support", keeps_history=True)
    of_session = kept.find(session).conversation
    kept.advance(of_session, "first", session)
    for number in range(5):
        alone = RequestContext(keeps_history=True)
        kept.advance(kept.find(alone).conversation, f"{number}", alone, history=f"said {number}")
    assert kept.find(session).conversation is of_session
    with pytest.raises(RequestError, match="no conversation in which this was said"):
        kept.find(RequestContext(keeps_history=True, earlier="said 2"))
    assert kept.find(RequestContext(keeps_history=True, earlier="said 3")).rollout_id == "3"


def test_conversations_with_other_instructions_are_others() -> None:
    def history(orders: str, with_orders: bool) -> str:
        texts = [("system", orders), ("user", "hi"), ("assistant", "Hello!")]
        messages = [{"role": role, "content": content} for role, content in texts]
        body = ChatRequest.model_validate({"model": "agent/a", "messages": messages})
        assert history_of(Question.from_chat(body).turns[:1], with_orders) == BEGINNING, (
            "nothing was said yet"
        )
        return history_of(Question.from_chat(body).turns, with_orders)

    assert history("Be a pirate.", with_orders=True) != history("Be a judge.", with_orders=True)
    assert history("Be a pirate.", with_orders=False) == history("Be a judge.", with_orders=False)


def test_white_space_of_an_answer_alone_makes_no_difference() -> None:
    code, answer = ("user", "if a:\n  b"), ("assistant", "<think>why</think>\nyes\n")
    assert history_of([code, answer]) == history_of([code, ("assistant", " yes")])
    assert history_of([code]) != history_of([("user", "if a:\n    b")])


def test_message_after_a_response_is_not_all_that_was_said() -> None:
    kept = Conversations(waits=False)
    first = stored("", 1)
    kept.advance(kept.find(first).conversation, "1", first, history="said 1")
    second = RequestContext(after="resp_1", keeps_history=True, answer_id="resp_2", can_be_followed=True)
    kept.advance(kept.find(second).conversation, "2", second, history="the second message alone")
    with pytest.raises(RequestError, match="no conversation in which this was said"):
        kept.find(RequestContext(keeps_history=True, earlier="the second message alone"))


def test_session_that_was_forgotten_is_error_until_it_is_ended() -> None:
    kept = Conversations(waits=False, most=1)
    for session in ("old", "new"):
        kept.find(RequestContext(session=session))
    with pytest.raises(RequestError, match="has forgotten this session after 1 newer") as error:
        kept.find(RequestContext(session="old"))
    assert status_of(error.value) == 409
    with pytest.raises(RequestError, match="There is no session 'old'"):
        kept.end_session("", "old")
    assert kept.find(RequestContext(session="old")).conversation.newest is None


async def test_conversation_with_a_message_under_way_is_kept() -> None:
    kept = Conversations(waits=False, most=1)
    busy = kept.find(RequestContext(session="busy")).conversation
    async with busy.turn(asyncio.Queue()):
        kept.find(RequestContext(session="other"))
        with pytest.raises(RequestError, match="is under way"):
            async with kept.find(RequestContext(session="busy")).conversation.turn(asyncio.Queue()):
                pass


def test_same_body_in_another_session_is_another_request() -> None:
    body = ChatRequest.model_validate({"model": "agent/a", "messages": [{"role": "user", "content": "hi"}]})
    assert digest(body, RequestContext(session="a")) == digest(body, RequestContext(session="a"))
    assert digest(body, RequestContext(session="a")) != digest(body, RequestContext(session="b"))
    assert digest(body, RequestContext()) != digest(body, RequestContext(session="None"))
