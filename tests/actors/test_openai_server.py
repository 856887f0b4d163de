"""The policy server over HTTP, with the official client, on real Serve and vLLM.

What does not depend on them is in ``test_policy_http``, with a scripted engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytestmark = pytest.mark.engine

QUESTION = [{"role": "user", "content": "What is 12+34?"}]


@pytest.fixture(scope="module")
def client(policy_app: Any) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=policy_app.base_url, api_key="EMPTY", max_retries=0) as client:
        yield client


def test_a_streamed_chat_says_what_a_whole_one_says(client: Any) -> None:
    options = {"model": "policy", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(**options, stream=True))

    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens <= 12
    assert whole.model_extra["policy_version"] >= 0


def test_a_completion_continues_token_ids(client: Any) -> None:
    answer = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, seed=1)
    again = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, seed=1)
    assert answer.usage.prompt_tokens == 3
    assert answer.choices[0].text == again.choices[0].text


def test_a_token_id_that_vllm_rejects_is_a_bad_request_and_the_server_goes_on(client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError):
        client.completions.create(model="policy", prompt=[999_999_999], max_tokens=4)
    assert client.completions.create(model="policy", prompt=[5], max_tokens=1).usage.completion_tokens == 1


def test_an_answer_has_the_form_that_was_asked_for(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [12, 34]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    create = partial(client.chat.completions.create, model="policy", messages=QUESTION, max_tokens=200)
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    answer = json.loads(create(response_format=form).choices[0].message.content)
    assert answer["a"] in (12, 34)

    function = {"name": "calculator", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
        (call,) = create(tools=tools, tool_choice=choice).choices[0].message.tool_calls
        assert call.function.name == "calculator"
        assert json.loads(call.function.arguments)["a"] in (12, 34)


def test_a_schema_that_cannot_be_followed_is_a_bad_request_and_the_server_goes_on(client: Any) -> None:
    from openai import BadRequestError

    create = partial(client.chat.completions.create, model="policy", messages=QUESTION, max_tokens=9)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(BadRequestError):
        create(response_format=form)
    assert create().choices[0].message.content is not None
