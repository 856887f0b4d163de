"""How the server finds the tool calls in an answer: by the parser of the model."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

from typing import Any

import pytest

from policies.agents.parsers import TEXT_PARSERS, get_tool_parser, parser_name_of
from policies.model_api.protocol import ChatRequest
from policies.model_api.reply import ChatReply, Piece
from policies.sampler import SamplingParams, TokenOutput, TokenRequest

TOOL_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>'
R1_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
    '{"expression": "12+34"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
CODER_CALL = """<tool_call>
<function=calculator>
<parameter=expression>
12+34
</parameter>
</function>
</tool_call>"""
CALLS = {
    "hermes": f"I calculate. {TOOL_CALL}",
    "hermes-brief": f"I calculate. {TOOL_CALL}",
    "qwen": f"I calculate. {TOOL_CALL}",
    "qwen3-coder": f"I calculate. {CODER_CALL}",
    "r1": f"I calculate. {R1_CALL}",
    "deepseek-v3": f"I calculate. {R1_CALL}",
    "mistral": 'I calculate. [TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "12+34"}}]',
    "llama3-json": '{"name": "calculator", "parameters": {"expression": "12+34"}}',
}


def piece(text: str, finish_reason: str = "stop") -> Piece:
    output = TokenOutput(
        token_ids=(1,), logprobs=(-1.0,), finish_reason=finish_reason, policy_version=0, token_versions=(0,)
    )
    return Piece(0, TokenRequest((1,), SamplingParams()), text, output, is_first=False)


@pytest.mark.parametrize("name", TEXT_PARSERS)
@pytest.mark.parametrize("stream", [False, True])
def test_parser_of_the_server_reads_the_calls(name: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is 12+34?"}]
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "stream": stream})
    reply = ChatReply(body, str, get_tool_parser(name))
    said = piece(CALLS[name])
    (answer,) = reply.chunks(said) if stream else [reply.whole([said], 1)]
    choice = answer["choices"][0]
    message: dict[str, Any] = choice["delta" if stream else "message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "12+34"}'}
    assert message.get("content") == (None if name == "llama3-json" else "I calculate.")
    assert choice["finish_reason"] == "tool_calls"


def message_of(text: str, finish_reason: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 12+34?"}]
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages})
    reply = ChatReply(body, str, get_tool_parser("hermes"))
    choice: dict[str, Any] = reply.whole([piece(text, finish_reason)], 1)["choices"][0]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("cut", ["<tool_call>", TOOL_CALL[:40], TOOL_CALL[:-1]])
def test_good_call_before_cut_one_is_sent_and_cut_one_stays_text(cut: str) -> None:
    message = message_of(f"I calculate. {TOOL_CALL}\n{cut}", "length")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["calculator"]
    assert message["content"] == f"I calculate. \n{cut}"
    assert message["finish_reason"] == "length"


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_numbers_that_json_has_not_never_reach_a_client(number: str) -> None:
    text = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {number}}}}}</tool_call>'
    message = message_of(text, "stop")
    assert "tool_calls" not in message
    assert message["content"] == text


def split_at_dots(text: str) -> tuple[str, str]:
    thought, _, answer = text.rpartition("... ")
    return thought, answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Why {TOOL_CALL}... 46", {"reasoning_content": f"Why {TOOL_CALL}", "content": "46"}),
        (f"Why... So. {TOOL_CALL}", {"reasoning_content": "Why", "content": "So."}),
        ("46", {"content": "46"}),
    ],
)
def test_reasoning_parser_sends_the_thought_beside_the_answer(
    text: str, expected: dict[str, str], stream: bool
) -> None:
    messages = [{"role": "user", "content": "What is 12+34?"}]
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "stream": stream})
    reply = ChatReply(body, str, get_tool_parser("hermes"), split=split_at_dots)
    (answer,) = reply.chunks(piece(text)) if stream else [reply.whole([piece(text)], 1)]
    choice = answer["choices"][0]
    message = dict(choice["delta" if stream else "message"])
    message.pop("role", None)
    calls = message.pop("tool_calls", [])
    assert message == expected
    assert len(calls) == (choice["finish_reason"] == "tool_calls") == text.endswith(TOOL_CALL)


def test_chat_template_shows_the_parser() -> None:
    shown = {
        "r1": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}",
        "llama3-json": """{{ '{"name": "' + tool_call.name + '", "parameters": ' }}""",
        "mistral": """{{ '[TOOL_CALLS][{"name": "x", "arguments": ' }}""",
        "qwen3-coder": """{{ '<tool_call>\\n<function=' + tool_call.name }}""",
        "hermes": """{{ '<tool_call>' }} with "parameters": in the schemas""",
    }
    for name, template in shown.items():
        assert parser_name_of(template) == name
