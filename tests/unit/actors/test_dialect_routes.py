"""The policy over HTTP in OpenAI's Responses and Anthropic's messages, with the official clients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from agent_server import ALICE, BOB, KEYS, listening
from pydantic import BaseModel
from test_policy_http import PinnedReplica, serving

from actors.settings import ServedModel

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

QUESTION = "What is 12+34?"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}

Serve = Callable[..., str]


@pytest.fixture
def serve(tokenizer_folder: Path) -> Iterator[Serve]:
    """Starts a server whose policy gives these answers, one after the other."""
    with ExitStack() as stack:

        def start(*replies: str, **options: Any) -> str:
            options = {"max_model_tokens": 4000, **options}
            client = stack.enter_context(serving(tokenizer_folder, replies=list(replies), **options))
            return stack.enter_context(listening(client))

        yield start


def openai_at(url: str, key: str = "none") -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def anthropic_at(url: str, key: str = "none") -> Anthropic:
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key=key, max_retries=0)


# -- Responses -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_response_is_kept_and_its_conversation_goes_on(serve: Serve) -> None:
    from openai import BadRequestError, NotFoundError

    client = openai_at(serve("46", "92", "92", "92"))
    first = client.responses.create(model="tiny", input=QUESTION, instructions="Be brief.")
    assert (first.output_text, first.status, first.instructions) == ("46", "completed", "Be brief.")
    assert client.responses.retrieve(first.id).output_text == "46"
    second = client.responses.create(model="tiny", input="Twice that?", previous_response_id=first.id)
    whole: Any = [{"role": "user", "content": QUESTION}, *first.output]
    again = client.responses.create(
        model="tiny", input=[*whole, {"role": "user", "content": "Twice that?"}], store=False
    )
    assert second.output_text == again.output_text == "92"
    assert second.usage is not None and second.usage == again.usage, "the model has read the same"
    names: Any = [{"type": "item_reference", "id": each.id} for each in first.output]
    named = client.responses.create(
        model="tiny", input=[whole[0], *names, {"role": "user", "content": "Twice that?"}]
    )
    assert named.usage == second.usage
    client.responses.delete(first.id)
    for gone in (first.id, again.id):
        with pytest.raises(NotFoundError, match="There is no response"):
            client.responses.retrieve(gone)
        with pytest.raises(
            BadRequestError, match=r"before this server was started.*Send the whole"
        ) as caught:
            client.responses.create(model="tiny", input="?", previous_response_id=gone)
        assert caught.value.code == "previous_response_not_found", "as OpenAI's own, and agents'"
    third = client.responses.create(model="tiny", input="And?", previous_response_id=second.id)
    assert third.usage is not None and third.usage.input_tokens > second.usage.input_tokens


def test_responses_of_one_key_are_no_other_keys(serve: Serve) -> None:
    from openai import BadRequestError, NotFoundError

    url = serve("46", keys=KEYS)
    response = openai_at(url, ALICE).responses.create(model="tiny", input=QUESTION)
    with pytest.raises(NotFoundError):
        openai_at(url, BOB).responses.retrieve(response.id)
    with pytest.raises(BadRequestError):
        openai_at(url, BOB).responses.create(model="tiny", input="?", previous_response_id=response.id)
    assert openai_at(url, ALICE).responses.retrieve(response.id).id == response.id


@pytest.mark.slow
def test_stream_of_response_has_all_events(serve: Serve) -> None:
    client = openai_at(serve(f"<think>\nI add.</think>\n\nI call it.{CALL}"))
    with client.responses.stream(model="tiny", input=QUESTION, tools=[TOOL]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    without_repeats = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert without_repeats == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert kinds.count("output_text.delta") > 1 and kinds.count("function_call_arguments.delta") > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    thought, text, call = final.output
    assert thought.type == "reasoning" and thought.summary[0].text == "\nI add."
    assert text.type == "message" and final.output_text == "I call it."
    assert call.type == "function_call" and json.loads(call.arguments) == {"a": 12, "b": 34}
    assert client.responses.retrieve(final.id).output_text == "I call it."


def test_functions_of_openai_client_are_called_in_a_loop(serve: Serve) -> None:
    client = openai_at(serve(CALL, "It is 46."))
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(model="tiny", input=items, tools=[TOOL], tool_choice="auto")  # type: ignore[list-item]
    (call,) = first.output
    assert call.type == "function_call" and call.name == "add"
    result = sum(json.loads(call.arguments).values())
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": str(result)}]
    second = client.responses.create(model="tiny", input=items, tools=[TOOL])  # type: ignore[list-item]
    assert second.output_text == "It is 46."
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_response_is_parsed_and_cut_one_is_incomplete(serve: Serve) -> None:
    class Sum(BaseModel):
        value: int

    client = openai_at(serve('{"value": 46}', "1234567890", keeps_structure=True))
    parsed = client.responses.parse(model="tiny", input=QUESTION, text_format=Sum)
    assert parsed.output_parsed == Sum(value=46)
    cut = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.slow
def test_pinned_version_answers_in_every_dialect(tokenizer_folder: Path, serve: Serve) -> None:
    version = ServedModel(path=str(tokenizer_folder), name="tiny@best", version=11)
    url = serve("111", version=31, pinned={version.name: (version, PinnedReplica(tokenizer_folder, version))})
    response = openai_at(url).responses.create(model="tiny@best", input="1")
    message = anthropic_at(url).messages.create(
        model="tiny@best", max_tokens=9, messages=[{"role": "user", "content": "1"}]
    )
    assert (response.output_text, text_of(message)) == ("222", "222")
    for answer in (response, message):
        assert answer.model_extra is not None and answer.model_extra["policy_version"] == 11


@pytest.mark.slow
def test_dropped_fields_are_named_in_a_header(serve: Serve) -> None:
    body = {"model": "tiny", "input": QUESTION, "user": "a", "service_tier": "flex", "metadata": {"a": "b"}}
    answer = httpx.post(f"{serve('46')}/v1/responses", json=body)
    assert answer.headers["x-dropped-fields"] == "service_tier, user"
    assert answer.headers["x-policy-version"] == "0" and answer.json()["metadata"] == {"a": "b"}
    asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": QUESTION}]}
    beta = {"anthropic-beta": "some-feature"}
    answer = httpx.post(f"{serve('46')}/v1/messages", json=asked | {"metadata": {}}, headers=beta)
    assert answer.headers["x-dropped-fields"] == "metadata, anthropic-beta"


# -- messages --------------------------------------------------------------------------------------------


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_message_is_answered_and_its_tokens_counted(serve: Serve) -> None:
    client = anthropic_at(serve("46", "46"))
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "system": "Be brief."}
    message = client.messages.create(**asked, max_tokens=9, extra_body={"temperature": 0.5, "top_k": 3})
    assert (text_of(message), message.stop_reason, message.role) == ("46", "end_turn", "assistant")
    assert client.messages.count_tokens(**asked).input_tokens == message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    cut = client.messages.create(**asked, max_tokens=1)
    assert cut.stop_reason == "max_tokens"


def test_stream_of_message_grows_in_blocks(serve: Serve) -> None:
    client = anthropic_at(serve(f"<think>\nI add.</think>\n\nI call it.{CALL}"))
    asked: Any = {"model": "tiny", "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    started = client.messages.create(**asked, stream=True)
    raw = [event.type for event in started]
    assert (raw[0], raw[-2:]) == ("message_start", ["message_delta", "message_stop"])
    with client.messages.stream(**asked) as stream:
        deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
        message = stream.get_final_message()
    thought, text, call = message.content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert call.type == "tool_use" and call.input == {"a": 12, "b": 34}
    assert text.type == "text" and text.text == "I call it."
    kinds = {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    assert kinds == set(deltas) and len(deltas) > 6
    assert message.stop_reason == "tool_use"
    assert (
        message.usage.input_tokens
        == client.messages.count_tokens(
            model="tiny", messages=asked["messages"], tools=[ANTHROPIC_TOOL]
        ).input_tokens
    )


def test_tools_of_anthropic_client_are_called_in_a_loop(serve: Serve) -> None:
    client = anthropic_at(serve(CALL, "It is 46."))
    asked: Any = {"model": "tiny", "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.messages.create(**asked, messages=messages, tool_choice={"type": "auto"})
    (call,) = first.content
    assert (first.stop_reason, call.type) == ("tool_use", "tool_use")
    assert call.type == "tool_use" and isinstance(call.input, dict)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**asked, messages=messages)
    assert (text_of(second), second.stop_reason) == ("It is 46.", "end_turn")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_call_with_half_a_character_reaches_the_client(serve: Serve, stream: bool) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    body = {"model": "tiny", "max_tokens": 500, "tools": [ANTHROPIC_TOOL], "stream": stream}
    body["messages"] = [{"role": "user", "content": QUESTION}]
    answer = httpx.post(f"{serve(call)}/v1/messages", json=body)
    assert answer.status_code == 200
    if stream:
        events = [json.loads(line) for line in re.findall("data: (.*)", answer.text)]
        arguments = json.loads("".join(event.get("delta", {}).get("partial_json", "") for event in events))
    else:
        arguments = answer.json()["content"][0]["input"]
    assert arguments == {"a": "\ud83d"}


def test_stop_sequence_is_the_reason_of_the_end(serve: Serve) -> None:
    client = anthropic_at(serve("12 END", "12 END", "12"))
    asked: Any = {"model": "tiny", "max_tokens": 50, "stop_sequences": ["no", "END"]}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert text_of(message) == "12 "
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    free = client.messages.create(**asked)
    assert (free.stop_reason, free.stop_sequence) == ("end_turn", None)


@pytest.mark.slow
@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_key_comes_in_either_header(serve: Serve, header: str) -> None:
    from anthropic import Anthropic, AuthenticationError

    url = serve("46", keys=KEYS)
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": QUESTION}]}
    credential = {"api_key" if header == "x-api-key" else "auth_token": ALICE}
    client = Anthropic(base_url=url, max_retries=0, **credential)  # type: ignore[arg-type]
    assert text_of(client.messages.create(**asked)) == "46"
    with pytest.raises(AuthenticationError) as caught:
        anthropic_at(url, "wrong").messages.create(**asked)
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "authentication_error",
            "message": "Send a key of this server, as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        },
    }


@pytest.mark.slow
def test_error_of_messages_has_anthropics_form(serve: Serve) -> None:
    from anthropic import APIStatusError, BadRequestError, NotFoundError

    url = serve("46")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [image]}]}
    with pytest.raises(BadRequestError, match="This model reads text only, and a message shows a picture"):
        anthropic_at(url).messages.create(**asked)
    with pytest.raises(NotFoundError, match="serves 'tiny'") as caught:
        anthropic_at(url).messages.create(
            model="other", max_tokens=9, messages=[{"role": "user", "content": "?"}]
        )
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert httpx.post(f"{url}/v1/messages", content="{").json()["type"] == "error"
    failing = anthropic_at(serve("1234567", fails_at=3))
    question: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    with pytest.raises(APIStatusError, match="overloaded_error"):
        for _ in failing.messages.create(**question, stream=True):
            pass
