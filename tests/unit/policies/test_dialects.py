"""Dialects turn requests into chats and chats into answers: what they honour, drop and refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from test_openai_protocol import MESSAGES, FakeEngine, ids_of, renderer

from policies.gateway.calls import policy_call
from policies.model_api.dialects.base import Chat, Dialect
from policies.model_api.dialects.messages import Messages, count_request
from policies.model_api.dialects.responses import Responses
from policies.model_api.dialects.responses_request import SUMMARY
from policies.model_api.errors import InvalidRequestError, UnavailableError
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.protocol import ChatRequest

Json = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "calculator", "parameters": SCHEMA, "strict": True}
TOOL = {"name": "calculator", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CHAT_TOOL = {"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>'


def responses(given: Any = "What is 12+34?", **fields: Any) -> Responses:
    return Responses({"model": "tiny", "input": given, **fields})


def messages(given: Any = "What is 12+34?", **fields: Any) -> Messages:
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return Messages({"model": "tiny", "max_tokens": 200, "messages": turns, **fields})


async def sampled(dialect: Dialect, text: str, finish_reason: str = "stop") -> list[Json]:
    """The answer, or the events, of a policy that samples ``text``."""
    engine = FakeEngine(ids_of(text, ended=finish_reason == "stop"), finish_reason=finish_reason)
    body = dialect.chat_request()
    parts = OpenAIFrontend("tiny", renderer(), engine).chat(body)
    if body.stream:
        return [event async for _, event in dialect.events(parts)]
    return [dialect.answer(await anext(parts))]


def fields_of(request: ChatRequest) -> Json:
    return request.model_dump(exclude_none=True, exclude={"model", "max_tokens", "cap_max_tokens"})


TEXTS = [
    ("46", "stop"),
    ("", "stop"),
    ("4", "length"),
    ("<think>\nI add.\n</think>\n\n46", "stop"),
    ("<think>\nI ad", "length"),
    (CALL, "stop"),
    (CALL + CALL, "stop"),
    (f"<think>add</think>I call it. {CALL}\n{CALL}", "stop"),
    (f"{CALL[:-30]}", "length"),
    ("`<think>` opens a thought", "stop"),
]


@pytest.mark.parametrize(("text", "finish_reason"), TEXTS)
def test_stream_and_whole_response_say_the_same(text: str, finish_reason: str) -> None:
    tools = {"tools": [FUNCTION]} if not text.startswith(CALL[:-30]) or text.endswith(">") else {}
    (whole,) = asyncio.run(sampled(responses(**tools), text, finish_reason))
    events = asyncio.run(sampled(responses(**tools, stream=True), text, finish_reason))
    streamed = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    for each in (whole, streamed):
        del each["created_at"], each["completed_at"]
    assert normal(streamed) == normal(whole)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert whole["status"] == ("completed" if finish_reason == "stop" else "incomplete")


@pytest.mark.parametrize(("text", "finish_reason"), TEXTS)
def test_stream_and_whole_message_say_the_same(text: str, finish_reason: str) -> None:
    tools = {"tools": [TOOL]} if not text.startswith(CALL[:-30]) or text.endswith(">") else {}
    (whole,) = asyncio.run(sampled(messages(**tools), text, finish_reason))
    events = asyncio.run(sampled(messages(**tools, stream=True), text, finish_reason))
    grown = accumulated(events)
    assert normal(grown) == normal(whole)
    begun = events[0]["message"]["usage"]["input_tokens"]
    assert begun == whole["usage"]["input_tokens"] > 0, "known from the first event on"


def normal(answer: Json) -> Json:
    """An answer without its ids, which no other has."""
    text = json.dumps(answer)
    items = answer.get("output") or answer.get("content") or []
    for name in [answer["id"], *(item[key] for item in items for key in ("id", "call_id") if key in item)]:
        text = text.replace(name, name.split("_")[0])
    return dict(json.loads(text))


def accumulated(events: list[Json]) -> Json:
    """The message that Anthropic's client makes of these events."""
    message = {**events[0]["message"]}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"] = [*message["content"], dict(event["content_block"])]
            text = ""
        elif event["type"] == "content_block_delta":
            (field,) = event["delta"].keys() - {"type"}
            block = message["content"][event["index"]]
            if field == "signature":
                block[field] = event["delta"][field]
                continue
            text += event["delta"][field]
            block["input" if field == "partial_json" else field] = text
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"])
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def test_response_that_is_sent_back_is_the_message_it_was() -> None:
    text = f"<think>add</think>I call it. {CALL}\n{CALL}"
    (answer,) = asyncio.run(sampled(responses(tools=[FUNCTION]), text))
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "46"} for call in calls]
    first, said, *tools = (
        responses([*responses().body.items(), *answer["output"], *results]).chat_request().messages
    )
    assert (first.role, said.role, [each.role for each in tools]) == ("user", "assistant", ["tool", "tool"])
    assert (said.reasoning_content, said.content) == ("add", "I call it.")
    assert [call.id for call in said.tool_calls or ()] == [each.tool_call_id for each in tools]


def test_message_that_is_sent_back_is_the_message_it_was() -> None:
    text = f"<think>add</think>I call it. {CALL}\n{CALL}"
    (answer,) = asyncio.run(sampled(messages(tools=[TOOL]), text))
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results: list[Json] = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "46"} for call in calls
    ]
    results[1] |= {"content": [{"type": "text", "text": "no number"}], "is_error": True}
    turns = [*MESSAGES, {"role": "assistant", "content": answer["content"]}]
    turns += [{"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}]
    _, said, one, two, last = messages(turns).chat_request().messages
    assert (said.reasoning_content, said.content) == ("add", "I call it.")
    assert [call.id for call in said.tool_calls or ()] == [one.tool_call_id, two.tool_call_id]
    assert (one.for_template["content"], two.for_template["content"]) == ("46", "Error: no number")
    assert (last.role, last.for_template["content"]) == ("user", "And?")


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def test_dialects_show_the_same_picture() -> None:
    picture = {"type": "image_url", "image_url": {"url": IMAGE["image_url"]}}
    text = {"type": "text", "text": "Which colour is it?"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    named = {**block, "source": {"type": "url", "url": IMAGE["image_url"]}, "cache_control": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block], "is_error": True}
    auto = {"type": "image_url", "image_url": {**picture["image_url"], "detail": "auto"}}
    made = {"type": "function_call", "call_id": "1", "name": "draw", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": [IMAGE]}
    asked = {"type": "input_text", "text": text["text"]}
    shown = {"role": "user", "content": [picture, text]}
    for request, expected in (
        (Chat({"model": "tiny", "messages": [{"role": "user", "content": [auto, text]}]}), shown),
        (responses([{"role": "user", "content": [IMAGE | {"detail": "auto"}, asked]}]), shown),
        (messages([{"role": "user", "content": [named, text]}]), shown),
        (responses([made, output]), {"tool_call_id": "1", "role": "tool", "content": [picture]}),
        (
            messages([{"role": "user", "content": [result]}]),
            {
                "tool_call_id": "1",
                "role": "tool",
                "content": [{"type": "text", "text": "Error: "}, picture],
            },
        ),
    ):
        assert request.chat_request().messages[-1].for_template == expected


def test_dialects_ask_for_the_same_chat() -> None:
    chat = Chat(
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, *MESSAGES],
            "tools": [CHAT_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "calculator"}},
            "parallel_tool_calls": False,
            "temperature": 0.5,
            "top_p": 0.9,
            "reasoning_effort": "low",
        }
    ).chat_request()
    choice = {"type": "function", "name": "calculator"}
    sampling = {"temperature": 0.5, "top_p": 0.9}
    response = responses(
        instructions="Be brief.",
        tools=[FUNCTION],
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        **sampling,
    )
    message = messages(
        system="Be brief.",
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "calculator", "disable_parallel_tool_use": True},
        output_config={"effort": "low"},
        **sampling,
    )
    assert fields_of(response.chat_request()) == fields_of(message.chat_request()) == fields_of(chat)
    assert response.dropped == ("strict", "summary") and message.dropped == ("cache_control",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, {}),
        ({"output_config": {"effort": "high"}}, {}),
        ({"top_k": 5}, {"top_k": 5}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema_": SCHEMA, "name": ""}}},
        ),
    ],
)
def test_field_of_messages_is_honoured(fields: Json, expected: Json) -> None:
    found = fields_of(messages(**fields).chat_request())
    assert {name: found[name] for name in found if name not in ("messages", "tools")} == expected


def test_max_tokens_of_messages_is_at_most_the_context() -> None:
    engine = FakeEngine(ids_of("46"))
    body = messages(max_tokens=32_000).chat_request()
    parts = OpenAIFrontend("tiny", renderer(), engine).chat(body)
    asyncio.run(anext(parts))
    ((prompt, params),) = engine.requests
    assert params.max_tokens == engine.max_model_tokens - len(prompt)


def test_answer_that_the_client_has_begun_goes_on() -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    request = messages(turns).chat_request()
    assert request.continue_final_message and request.messages[-1].content == "It is"


def test_harmless_fields_are_dropped_and_named() -> None:
    response = responses(
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"role": "user", "content": "?"},
        ],
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        service_tier="flex",
        prompt_cache_key="a",
        truncation="auto",
        user=None,
    )
    assert response.dropped == (
        *("encrypted_content", "id", "include", "prompt_cache_key", "service_tier", "truncation"),
    )
    assert [message.role for message in response.chat_request().messages] == ["assistant", "user"]
    message = messages(metadata={"user_id": "a"}, thinking={"type": "enabled", "budget_tokens": 1024})
    assert message.dropped == ("budget_tokens", "metadata")
    assert Chat({"model": "tiny", "messages": MESSAGES, "user": "a"}).dropped == ("user",)


FILE = {"type": "input_file", "file_id": "file_1"}


@pytest.mark.parametrize(
    ("given", "fields", "place"),
    [
        ("?", {"tools": [{"type": "web_search"}]}, "tools.0: a tool of type 'web_search'"),
        ("?", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ("?", {"background": True}, "background"),
        ("?", {"conversation": "conv_1"}, "conversation"),
        ("?", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("?", {"top_logprobs": 3}, "top_logprobs"),
        ("?", {"max_output_tokens": 0}, "max_output_tokens"),
        ([{"role": "user", "content": [FILE]}], {}, "input.0.content.0: 'input_file' is a file"),
        ([{"role": "assistant", "content": [IMAGE]}], {}, "input.0: the assistant shows no pictures"),
        (
            [{"role": "user", "content": [IMAGE | {"detail": "high"}]}],
            {},
            "input.0.content.0.detail: Input should be 'auto'",
        ),
        ([{"type": "item_reference"}], {}, "input.0.id"),
        ([{"type": "function_call", "call_id": "1", "name": "f"}], {}, "input.0.arguments"),
        (
            [{"type": "function_call_output", "call_id": "1", "output": [FILE]}],
            {},
            "input.0.output.0: 'input",
        ),
    ],
)
def test_field_that_a_response_cannot_have_is_named(given: Any, fields: Json, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        responses(given, **fields)
    assert caught.value.message.startswith(place)


@pytest.mark.parametrize(
    ("blocks", "fields", "place"),
    [
        (
            [],
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0: a tool of type 'bash_20250124'",
        ),
        ([], {"mcp_servers": [{}]}, "mcp_servers"),
        (
            [],
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits.0.type: Input should be 'clear_thinking_20251015'",
        ),
        ([], {"max_tokens": None}, "max_tokens"),
        ([], {"tool_choice": {"type": "tool"}}, "tool_choice: type='tool' and a name need each other"),
        (
            [{"type": "document", "source": {}}],
            {},
            "messages.0.content.0: 'document' is a file, which no model here reads",
        ),
        ([{"type": "server_tool_use"}], {}, "messages.0.content.0: a block of type 'server_tool_use'"),
        ([{"type": "tool_use", "id": "1", "name": "f", "input": {}}], {}, "messages.0: block 0 is of type"),
    ],
)
def test_field_that_a_message_cannot_have_is_named(blocks: list[Json], fields: Json, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages([{"role": "user", "content": blocks or "?"}], **fields)
    assert caught.value.message.startswith(place)


@pytest.mark.parametrize("name", ["tools", "text", "reasoning"])
def test_half_a_character_is_sent_back_to_nobody(name: str) -> None:
    fields = {
        "tools": [{"type": "function", "name": "f", "parameters": {"title": "\ud83d"}}],
        "text": {"format": {"type": "json_schema", "name": "\ud83d", "schema": {}}},
        "reasoning": {"effort": "\ud83d"},
    }
    with pytest.raises(InvalidRequestError, match="no Unicode"):
        responses(**{name: fields[name]})


def test_errors_have_the_form_of_their_dialect() -> None:
    too_many = InvalidRequestError("max_tokens=9 is too much: lower it.", param="max_tokens")
    status, body = Responses.error(too_many)
    assert (status, body["error"]["param"]) == (400, "max_output_tokens")
    assert body["error"]["message"] == "max_output_tokens=9 is too much: lower it."
    assert Messages.error(too_many) == (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": too_many.message}},
    )
    busy = UnavailableError("Too busy.")
    assert Messages.error(busy)[1]["error"]["type"] == "overloaded_error"
    assert Chat.error(busy) == (
        503,
        {"error": {"message": "Too busy.", "type": "server_error", "param": None, "code": None}},
    )


def test_conversation_goes_on_only_from_one_that_is_known() -> None:
    first = responses()
    asyncio.run(sampled(first, "46"))
    second = responses("Twice that?", previous_response_id="resp_1", instructions="Be brief.")
    with pytest.raises(InvalidRequestError, match="resp_1"):
        second.follow(None)
    second.follow(first.conversation())
    roles = [(message.role, message.content) for message in second.chat_request().messages[:3:2]]
    assert roles == [("system", "Be brief."), ("assistant", "46")]


def test_named_items_are_those_of_the_responses_before() -> None:
    """Some clients send the names alone of what a server keeps for them."""
    first = responses(tools=[FUNCTION])
    (answer,) = asyncio.run(sampled(first, f"<think>\nI add.\n</think>\n\n{CALL}"))
    result = {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": "46"}
    names, question = [named(each) for each in answer["output"]], {"role": "user", "content": "12+34?"}
    second = responses([question, *names, result], tools=[FUNCTION])
    with pytest.raises(InvalidRequestError, match=f"no item {names[-1]['id']!r} .* Send the item itself"):
        second.follow(None)
    assert second.follows == first.response_id
    second.follow(first.conversation())
    whole = responses([question, *answer["output"], result], tools=[FUNCTION])
    assert second.follows is None
    assert fields_of(second.chat_request()) == fields_of(whole.chat_request())
    (later,) = asyncio.run(sampled(second, "46"))
    third = responses([question, *names, result, *map(named, later["output"]), question], tools=[FUNCTION])
    third.follow(second.conversation())  # it has the items of the first response, too
    assert [each.role for each in third.chat_request().messages[-2:]] == ["assistant", "user"]
    with pytest.raises(InvalidRequestError, match="no item") as caught:
        responses([named({"id": f"msg_{'0' * 32}009"})]).follow(first.conversation())
    assert caught.value.param == "input"


def test_item_may_be_of_another_response_than_the_earlier_one() -> None:
    (answer,) = asyncio.run(sampled(first := responses(), "46"))
    body = {"model": "tiny", "previous_response_id": "resp_1", "input": [named(answer["output"][0])]}
    second = Responses(body)
    second.follow([{"type": "message", "role": "user", "content": "Why?"}])
    assert second.follows == answer["id"]
    second.follow(first.conversation())
    assert second.follows is None
    assert [each.content for each in second.chat_request().messages] == ["Why?", "46"]


def test_summary_is_a_message_of_its_own() -> None:
    """Else the text of an answer after it is read as the end of its last sentence."""
    summary = {"type": "compaction", "encrypted_content": f"{SUMMARY}They asked."}
    texts = [{"type": "message", "role": "assistant", "content": each} for each in ("Before.", "After.")]
    chat = responses([texts[0], summary, texts[1]]).chat_request()
    assert [each.content for each in chat.messages] == ["Before.", f"{SUMMARY}They asked.", "After."]


def named(item: Json) -> Json:
    return {"type": "item_reference", "id": item["id"]}


def test_result_without_its_call_is_an_error() -> None:
    """As at OpenAI: a chat template would show the model a result of nothing."""
    output = {"type": "function_call_output", "call_id": "call_7", "output": "46"}
    call = {"type": "function_call", "call_id": "call_7", "name": "add", "arguments": "{}"}
    for given in ([output], [output, call]):
        with pytest.raises(InvalidRequestError, match="'call_7' has no function_call before it") as caught:
            responses(given).chat_request()
        assert caught.value.param == "input"
    assert len(responses([call, output]).chat_request().messages) == 2


@pytest.mark.parametrize("fields", [{}, {"input": []}])
def test_response_needs_an_input(fields: Json) -> None:
    with pytest.raises(InvalidRequestError, match="input: there is none: send a text") as caught:
        Responses({"model": "tiny", **fields})
    assert caught.value.param == "input"
    goes_on = Responses({"model": "tiny", "previous_response_id": "resp_1", **fields})
    goes_on.follow(responses().body.items())
    assert len(goes_on.chat_request().messages) == 1


def test_prompt_is_counted_as_it_is_sampled_from() -> None:
    turns = [{"role": "user", "content": "What is 12+34?"}]
    counted = OpenAIFrontend("tiny", renderer(), FakeEngine([])).num_prompt_tokens(
        count_request({"model": "tiny", "messages": turns})
    )
    (answer,) = asyncio.run(sampled(messages(turns), "46"))
    assert counted == answer["usage"]["input_tokens"]


async def test_chat_passes_chunks_on_as_they_are() -> None:
    async def chunks() -> AsyncIterator[Json]:
        yield {"id": 1}

    events = [event async for event in Chat({"model": "tiny", "messages": MESSAGES}).events(chunks())]
    assert events == [(None, {"id": 1})]


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        (messages(thinking={"type": "enabled", "budget_tokens": 1024}), "thinking"),
        (messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]), "last message"),
        (
            messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
            "output_config.format",
        ),
        (responses(text={"format": {"type": "json_schema", "schema": SCHEMA}}), "text.format"),
    ],
)
def test_refusal_names_the_field_that_the_client_sent(dialect: Dialect, name: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        policy_call(dialect.chat_request())
    _, body = dialect.error(refused.value)
    assert body["error"]["message"].startswith("A rollout ") and f" {name}" in body["error"]["message"]


def test_fields_that_hold_nothing_are_left_out() -> None:
    """Clients write an answer whole when they send it back, with fields that only newer servers fill."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "toolset_name": None}
    text = {"type": "text", "text": "a", "parsed_output": {"value": 1}, "newer": None}
    answer, user = {"role": "assistant", "content": [text, call]}, {"role": "user", "content": "q"}
    first = messages([user, answer, user])
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": None}
    second = responses([{"role": "user", "content": "q"}, item], prompt=None)
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "q", "newer": None}],
        "prediction": None,
    }
    for dialect in (first, second, Chat(chat)):
        dialect.chat_request()
    with pytest.raises(InvalidRequestError, match="newer"):
        Chat({**chat, "newer": 0})
