"""What ``POST /v1/responses`` takes as ``input``: also what OpenAI's clients send back of an answer."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policies.openai.protocol import openai_error
from policies.openai.responses import ResponsesRequest


def request(given: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "agent/calculator", "input": given})


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    text = {"type": "output_text", "text": "46", "annotations": [], "logprobs": []}
    output = [
        {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "12+34"}]},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]},
    ]
    history = [{"role": "user", "content": "12+34?"}, *output, {"role": "user", "content": "Twice that?"}]
    messages = request(history).for_chat().messages
    assert [(each.role, each.content) for each in messages] == [
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
def test_an_error_names_the_place_as_the_client_knows_it(given: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        request(given)
    assert openai_error(caught.value).message.startswith(message)
