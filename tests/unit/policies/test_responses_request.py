"""What ``POST /v1/responses`` takes as ``input``: also what OpenAI's clients send back of an answer."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policies.agent_api.responses import ResponsesRequest
from policies.model_api.errors import request_error


def request(given: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "agent/calculator", "input": given})


def test_answer_can_be_sent_back_as_it_came() -> None:
    text = {"type": "output_text", "text": "46", "annotations": [], "logprobs": []}
    output = [
        {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "12+34"}]},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]},
    ]
    history = [{"role": "user", "content": "12+34?"}, *output, {"role": "user", "content": "Twice that?"}]
    assert request(history).question().turns == [
        ("user", "12+34?"),
        ("assistant", "46"),
        ("user", "Twice that?"),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "input: Input should be a valid string. input: Input should be a valid list."),
        ("a\ud83d", "input: the text is no Unicode at position 1"),
        ([{"role": "user", "content": "a\ud83d"}], "input.0.content: the text is no Unicode at position 1"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a\ud83d"}]}],
            "input.0.content.0.text: the text is no Unicode at position 1",
        ),
        ([{"role": "critic", "content": "No."}], "input.0.role: Input should be 'user', "),
        (
            [{"role": "user", "content": "Hi", "colour": "red"}],
            "input.0.colour: this server does not support",
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "text": "Hi"}]}],
            "input.0.content.0.type: Input should be 'input_text' or 'output_text'.",
        ),
    ],
)
def test_error_names_the_place_as_the_client_knows_it(given: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        request(given)
    assert request_error(caught.value).message.startswith(message)


def test_fields_that_change_nothing_for_an_agent_are_taken() -> None:
    harmless = {
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "instructions": "",
        "reasoning": {"effort": "low", "summary": "auto"},
        "top_logprobs": 0,
        "stream_options": {"include_obfuscation": False},
        "truncation": "auto",
    }
    for fields in (harmless, dict.fromkeys(harmless)):
        body = ResponsesRequest.model_validate({"model": "agent/calculator", "input": "12+34?", **fields})
        assert body.question() == request("12+34?").question()


@pytest.mark.parametrize(
    "field",
    [
        {"text": {"format": {"type": "json_object"}}},
        {"top_logprobs": 3},
        {"tools": [{"type": "web_search"}]},
        {"max_output_tokens": 0},
    ],
)
def test_field_that_would_change_an_agents_answer_is_an_error(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"model": "agent/calculator", "input": "12+34?", **field})
    assert str(request_error(caught.value).message).startswith(next(iter(field)))


def test_instructions_are_a_system_message_and_limits_are_tokens() -> None:
    given = {"input": "12+34?", "instructions": "Be brief.", "max_output_tokens": 30}
    body = ResponsesRequest.model_validate({"model": "agent/calculator", **given})
    assert body.question().turns == [
        ("system", "Be brief."),
        ("user", "12+34?"),
    ]
    assert body.question().sampling == {"max_tokens": 30}


def test_answer_may_be_sent_back_by_its_name() -> None:
    number = "0" * 31 + "7"
    for answer in (
        {"type": "item_reference", "id": f"msg_{number}001"},
        {"role": "assistant", "content": "46", "id": f"msg_{number}001"},
    ):
        steps = {"type": "item_reference", "id": f"rs_{number}000"}
        body = request(
            [{"role": "user", "content": "12+34?"}, steps, answer, {"role": "user", "content": "Twice?"}]
        )
        assert body.after == f"resp_{number}"
        assert body.question().turns[-1] == ("user", "Twice?")
    assert request("12+34?").after is None
    foreign = {"role": "assistant", "content": "46", "id": "msg_of_another_server"}
    assert request([foreign, {"role": "user", "content": "Twice?"}]).after is None
