"""The policy server over HTTP, with the official client, on real Serve and vLLM.

What does not depend on them is in ``test_policy_http``, with a scripted engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

QUESTION = [{"role": "user", "content": "What is 12+34?"}]


@pytest.fixture(scope="module")
def client(policy_app: Any) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=policy_app.base_url, api_key="EMPTY", max_retries=0) as client:
        yield client


def test_streamed_chat_says_what_a_whole_one_says(client: Any) -> None:
    options = {"model": "policy", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(**options, stream=True))

    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens <= 12
    assert whole.model_extra["policy_version"] >= 0


def test_completion_continues_token_ids(client: Any) -> None:
    answer = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, seed=1)
    again = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, seed=1)
    assert answer.usage.prompt_tokens == 3
    assert answer.choices[0].text == again.choices[0].text


def test_token_id_that_vllm_rejects_is_a_bad_request(client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError):
        client.completions.create(model="policy", prompt=[999_999_999], max_tokens=4)
    assert client.completions.create(model="policy", prompt=[5], max_tokens=1).usage.completion_tokens == 1


def test_answer_has_the_form_that_was_asked_for(client: Any) -> None:
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

    with client.chat.completions.stream(
        model="policy", messages=QUESTION, max_tokens=200, tools=tools, tool_choice="required"
    ) as stream:
        grown = [event.arguments for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert len(grown) > 1
    assert json.loads(call.function.arguments)["a"] in (12, 34)


def test_schema_that_cannot_be_followed_is_a_bad_request(client: Any) -> None:
    from openai import BadRequestError

    create = partial(client.chat.completions.create, model="policy", messages=QUESTION, max_tokens=9)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(BadRequestError):
        create(response_format=form)
    assert create().choices[0].message.content is not None


def test_log_probabilities_of_prompt_are_those_of_its_sampling(client: Any) -> None:
    """As evaluation harnesses ask for them: ``echo`` with ``logprobs``, and no answer."""
    prompt = [5, 6, 7, 8]
    ask = partial(client.completions.create, model="policy", temperature=1, seed=3)
    sampled = ask(prompt=prompt, max_tokens=4, logprobs=2, extra_body={"return_token_ids": True}).choices[0]
    whole = [*prompt, *sampled.model_extra["token_ids"]]
    echoed = ask(prompt=whole, max_tokens=0, logprobs=2, echo=True).choices[0]
    assert echoed.logprobs.token_logprobs[0] is None and len(echoed.logprobs.tokens) == len(whole)
    for name in ("token_logprobs", "top_logprobs"):
        found, expected = getattr(echoed.logprobs, name)[4:], getattr(sampled.logprobs, name)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


def test_options_of_the_engine_act(client: Any) -> None:
    create = partial(client.chat.completions.create, model="policy", messages=QUESTION, temperature=0)
    long = create(max_tokens=40, extra_body={"ignore_eos": True})
    assert long.usage.completion_tokens == 40
    short = create(max_tokens=40, extra_body={"min_tokens": 5, "stop_token_ids": list(range(5, 15))})
    assert 5 <= short.usage.completion_tokens <= 40
    create(
        max_tokens=3,
        frequency_penalty=1,
        presence_penalty=1,
        extra_body={"min_p": 0.1, "repetition_penalty": 2},
    )
    likely = create(max_tokens=3, logprobs=True, top_logprobs=3, top_p=0.5).choices[0].logprobs.content
    assert all(1 <= len(entry.top_logprobs) <= 3 for entry in likely)
    said = (
        create(extra_body={"structured_outputs": {"choice": ["twelve", "thirty"]}}).choices[0].message.content
    )
    assert said in ("twelve", "thirty")


def test_schema_that_leads_back_to_itself_is_a_bad_request(client: Any) -> None:
    from openai import BadRequestError

    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    with pytest.raises(BadRequestError, match=r"\$ref"):
        client.chat.completions.create(model="policy", messages=QUESTION, response_format=form)


def test_json_of_lists_in_lists_is_no_row_of_blanks(client: Any) -> None:
    schema = {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        choice = client.chat.completions.create(
            model="policy", messages=QUESTION, response_format=form, max_tokens=250, seed=seed
        ).choices[0]
        assert choice.finish_reason == "stop" and isinstance(json.loads(choice.message.content), list)


def test_routes_of_the_cluster_are_told_to_nobody(policy_app: Any) -> None:
    root = policy_app.base_url.removesuffix("/v1")
    assert httpx.get(f"{root}/-/routes").status_code == 404
    for path in ("/health", "/ready"):
        assert httpx.head(f"{root}{path}", headers={"host": "10.0.0.1"}).status_code == 200
    assert "troupe_cached_prompt_tokens_total" in httpx.get(f"{root}/metrics").text


ADD = {
    "type": "object",
    "properties": {"a": {"enum": [12, 34]}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_response_says_what_chat_says_and_goes_on(client: Any) -> None:
    create = partial(client.responses.create, model="policy", temperature=0, max_output_tokens=12)
    chat = client.chat.completions.create(model="policy", messages=QUESTION, temperature=0, max_tokens=12)
    first = create(input=QUESTION[0]["content"])
    assert first.output_text == chat.choices[0].message.content
    *_, last = create(input=QUESTION, stream=True)
    assert last.response.output_text == first.output_text and last.response.usage == first.usage
    following = create(input="And twice that?", previous_response_id=first.id)
    messages = [*QUESTION, {"role": "assistant", "content": first.output_text}]
    messages += [{"role": "user", "content": "And twice that?"}]
    chat = client.chat.completions.create(model="policy", messages=messages, temperature=0, max_tokens=12)
    assert following.output_text == chat.choices[0].message.content
    assert following.usage.input_tokens == chat.usage.prompt_tokens
    client.responses.delete(first.id)
    assert client.responses.retrieve(following.id).output_text == following.output_text
    (call,) = client.responses.create(
        model="policy",
        input=QUESTION,
        tools=[{"type": "function", "name": "calculator", "parameters": ADD}],
        tool_choice="required",
    ).output
    assert (call.type, json.loads(call.arguments)["a"] in (12, 34)) == ("function_call", True)


def test_message_says_what_chat_says(client: Any, policy_app: Any) -> None:
    from anthropic import Anthropic

    anthropic = Anthropic(base_url=policy_app.base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    chat = client.chat.completions.create(model="policy", messages=QUESTION, temperature=0, max_tokens=12)
    asked: dict[str, Any] = {"model": "policy", "messages": QUESTION, "max_tokens": 12}
    asked["extra_body"] = {"temperature": 0}
    whole = anthropic.messages.create(**asked)
    with anthropic.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text == chat.choices[0].message.content
    assert whole.usage.input_tokens == streamed.usage.input_tokens == chat.usage.prompt_tokens
    counted = anthropic.messages.count_tokens(model="policy", messages=QUESTION)
    assert counted.input_tokens == chat.usage.prompt_tokens
    tool = {"name": "calculator", "input_schema": ADD}
    with anthropic.messages.stream(
        model="policy",
        messages=QUESTION,
        max_tokens=100_000,
        tools=[tool],
        tool_choice={"type": "tool", "name": "calculator"},
    ) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use" and called.content[0].input["a"] in (12, 34)
    ended = anthropic.messages.create(**asked | {"stop_sequences": [whole.content[0].text[:1]]})
    assert (ended.stop_reason, ended.content) == ("stop_sequence", [])
