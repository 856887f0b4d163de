"""A session of the gateway: what is remembered from one call to the next changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.rollouts.rollout import PastTurns
from environments.thoughts import split_thought
from environments.types import Completion, Message, Step, Trajectory
from policies.agents.parsers import get_tool_parser
from policies.chat import ChatRenderer
from policies.gateway.answers import for_template, message_of
from policies.gateway.calls import policy_call
from policies.gateway.session import PlacedCall, PolicyCall, Session
from policies.learning.samples import TrainingSample, training_samples
from policies.model_api.dialects.base import Chat, ChatReader
from policies.model_api.dialects.messages import Messages
from policies.model_api.dialects.responses import Responses
from policies.model_api.errors import InvalidRequestError
from policies.sampler import Turn
from policies.tiny import build_tokenizer

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWERS = ("yes", " yes", "<think>\nwhy\n</think>\n\nno", CALL)
"""Texts that the model says."""
VALUES = ("1", "true", "1.0", '"1"', "0", "false")
"""Values of an argument as a program writes them anew, of which the first and third mean what was said."""
PARSER = get_tool_parser("qwen")
TEXTS = st.sampled_from(["a", " a", "yes", "1"])
PLACES = st.integers(0, 9)
EDITS = st.one_of(
    st.tuples(st.just("say"), TEXTS),
    st.tuples(st.just("answer"), TEXTS),
    st.tuples(st.just("cut"), PLACES),
    st.tuples(st.just("compact"), PLACES),
    st.tuples(st.just("edit"), PLACES, TEXTS),
    st.tuples(st.just("arguments"), PLACES, st.sampled_from(VALUES)),
    st.tuples(st.just("thought"), PLACES),
    st.tuples(st.just("fork"), PLACES),
)
CALLS = st.lists(
    st.tuples(
        st.lists(EDITS, max_size=3),
        st.sampled_from(ANSWERS),
        st.sampled_from((None, 1, 2, 2)),
        st.integers(1, 2),
    ),
    max_size=8,
)
"""Calls of a program: edits of its history before each, the answer, the tools, and how often it is made."""


def edited(history: list[Message], past: list[str], edit: tuple[Any, ...]) -> list[Message]:
    """The history after an edit; ``past`` has the histories of all calls before."""
    kind, place, *value = edit
    if kind in ("say", "answer"):
        return [*history, {"role": "user" if kind == "say" else "assistant", "content": place}]
    if kind == "fork":
        return json.loads(past[place % len(past)])
    message = history[place := place % len(history)]
    called = [call["function"] for each in history for call in each.get("tool_calls", ())]
    match kind:
        case "cut":
            return history[: place + 1]
        case "compact":
            return [*history[:1], {"role": "user", "content": "in short"}, *history[place + 1 :]]
        case "edit":
            message["content"] = value[0]
        case "thought":
            message.pop("reasoning_content", None)
        case "arguments":
            for function in called[place % max(len(called), 1) :][:1]:
                function["arguments"] = f'{{"x": {value[0]}}}'
    return history


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(build_tokenizer([[{"role": "user", "content": "a yes no in short"}]]))


Script = list[tuple[list[tuple[Any, ...]], str, int | None, int]]


@dataclass(frozen=True)
class Played:
    """A call: its messages as they came, its place, and its turn."""

    came: list[Message]
    placed: PlacedCall
    step: Step


def played(script: Script, remembers: bool) -> list[Played]:
    """A program's calls: as they were placed, their turns, and what is trained of them.

    Args:
        remembers: False reads and places all messages of each call anew.
    """
    session, reader, past = Session(), ChatReader(), PastTurns()
    history: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    sent, calls, number = [json.dumps(history)], [], 0
    for edits, text, tools, times in script:
        for edit in edits:
            history = edited(history, sent, edit)
        sent.append(json.dumps(history))
        offered = {} if tools is None else {"tools": TOOLS[:tools]}
        for _ in range(times):
            body = {"model": "m", "messages": json.loads(sent[-1]), **offered}
            call = policy_call((reader if remembers else ChatReader()).read(body))
            placed = session.place(call)
            previous, messages = past.before(placed.messages)
            prompt_ids = renderer().prompt_ids(messages, previous, call.tools)
            ids = (*renderer().encode(text), renderer().eos_token_id)
            completion = Completion(
                prompt_ids=tuple(prompt_ids),
                completion_ids=ids,
                logprobs=(0.0,) * len(ids),
                text=text,
                finish_reason="stop",
            )
            past.add(Turn(messages=messages, completion=completion, tools=call.tools))
            message = message_of(text, [], PARSER if call.tools else None, number)
            number += len(message.get("tool_calls", ()))
            session.answer(text, for_template(message))
            step = Step(chat_completions=messages, completion=completion)
            calls.append(Played(call.messages, placed, step))
        history.append(json.loads(json.dumps(message)))
    return calls


@given(CALLS)
@example([([], CALL, 2, 1), ([("arguments", 0, "true")], "yes", 2, 1)])
@example(
    [([], CALL, 2, 1), ([("arguments", 0, "0")], "yes", 2, 1), ([("arguments", 0, "false")], "yes", 2, 1)]
)
@settings(deadline=None, max_examples=30, derandomize=True)
def test_remembered_messages_leave_the_tree_as_it_is(script: Script) -> None:
    calls, anew = played(script, remembers=True), played(script, remembers=False)
    assert calls == anew
    assert trained(calls) == trained(anew)
    for call in calls:  # as text, since 1 == True
        assert json.dumps(call.step.chat_completions) == json.dumps(call.placed.messages)
        for came, shown in zip(call.came, call.placed.messages, strict=True):
            said = for_template(message_of(shown["content"], [], PARSER, 0))
            assert json.dumps(came) == json.dumps(shown) or meaning(came) == meaning(said)
        if call.placed.follows is not None:  # the latest of its own answers: all behind it are foreign
            before = calls[call.placed.follows].step
            assert before.completion is not None
            known = [*before.chat_completions, {"role": "assistant", "content": before.completion.text}]
            assert call.placed.messages[: len(known)] == known
            later = [each["role"] for each in call.placed.messages[len(known) :]]
            assert later.count("assistant") <= call.placed.num_foreign


def trained(calls: list[Played]) -> list[TrainingSample]:
    return training_samples(Trajectory(rollout_id="a", steps=[call.step for call in calls]))


def meaning(message: Message) -> str:
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return json.dumps([split_thought(message["content"] or "")[1].split(), calls]).replace("1.0", "1")


def test_answer_needs_a_call_that_was_placed() -> None:
    with pytest.raises(AssertionError, match="placed before"):
        Session().answer("a", {"role": "assistant", "content": "a"})


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


def test_answer_repeated_by_the_user_is_no_dropped_thought() -> None:
    session, asked = Session(), {"role": "user", "content": "Where?"}
    session.place(PolicyCall([asked]))
    session.answer("Paris", {"role": "assistant", "content": "Paris"})
    repeated = session.place(PolicyCall([asked, {"role": "user", "content": "Paris"}]))
    assert repeated.branch == "answer edited"


@pytest.mark.parametrize(
    ("keeps", "ids", "branch"),
    [(True, "call_0", ""), (False, "call_0", "answer edited"), (True, "call_9", "answer edited")],
    ids=["kept", "as in service", "another call"],
)
def test_text_beside_a_call_may_be_left_out(keeps: bool, ids: str, branch: str) -> None:
    session, asked = Session(keeps_thoughts=keeps), {"role": "user", "content": "Where?"}
    session.place(PolicyCall([asked]))
    sent = for_template(message_of(f"I look.\n{CALL}", [], PARSER.for_tools(TOOLS), 0))
    session.answer(f"I look.\n{CALL}", sent)
    calls = [{**each, "id": ids} for each in sent["tool_calls"]]
    given = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": ids, "content": "Paris"}
    placed = session.place(PolicyCall([asked, given, result]))
    assert placed.branch == branch
    assert placed.messages[1]["content"] == ("" if branch else f"I look.\n{CALL}")


@pytest.mark.parametrize("keeps", [True, False])
def test_white_space_that_is_left_out_is_no_lost_text(keeps: bool) -> None:
    session, asked = Session(keeps_thoughts=keeps), {"role": "user", "content": "Where?"}
    session.place(PolicyCall([asked]))
    session.answer("\n\n", message_of("\n\n", [], None, 0))
    placed = session.place(PolicyCall([asked, {"role": "assistant", "content": ""}, asked]))
    assert (placed.branch, placed.num_foreign, placed.num_restored) == ("", 0, 0)


def test_field_that_is_null_is_not_overruled() -> None:
    fields = {"temperature": 0.5, "top_p": None, "seed": None, "reasoning_effort": None}
    body = {"model": "m", "messages": [{"role": "user", "content": "Where?"}], **fields}
    assert policy_call(Chat(body).chat_request()).overruled == ("temperature",)


@pytest.mark.parametrize(
    "answers",
    [
        ("if a:\n  b", "if a:\n    b"),
        ("yes\n", " yes"),
        ("<think>a b</think>\nyes", "<think>a\nb</think>\nyes"),
        (CALL, CALL.replace("1", "1.0")),
        ("<think>a</think>\nyes", "yes"),
    ],
    ids=["text", "ends", "thought", "number", "no thought"],
)
def test_choice_that_comes_back_is_not_one_that_is_like_it(answers: tuple[str, str]) -> None:
    session, asked = Session(), {"role": "user", "content": "Where?"}
    sent = [for_template(message_of(text, [], PARSER.for_tools(TOOLS), 0)) for text in answers]
    for text, message in zip(answers, sent, strict=True):
        session.place(PolicyCall([asked]))
        session.answer(text, message)
    for number, message in enumerate(sent):  # also where its calls have got other ids
        assert session.place(PolicyCall([asked, message])).follows == number
