"""How the server finds the tool calls in an answer: by the parser of the model."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

from typing import Any

import pytest

from actors.settings import TOOL_PARSERS
from policies.agents.parsers import PARSERS, get_tool_parser, parser_name_of
from policies.openai.protocol import ChatRequest
from policies.openai.reply import ChatReply, Piece
from policies.sampler import SamplingParams, TokenOutput, TokenRequest

TOOL_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>'
CALLS = {
    "hermes": f"I calculate. {TOOL_CALL}",
    "hermes-brief": f"I calculate. {TOOL_CALL}",
    "qwen": f"I calculate. {TOOL_CALL}",
    "r1": (
        "I calculate. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
        '{"expression": "12+34"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "llama3-json": '{"name": "calculator", "parameters": {"expression": "12+34"}}',
}


def piece(text: str) -> Piece:
    output = TokenOutput(
        token_ids=(1,), logprobs=(-1.0,), finish_reason="stop", policy_version=0, token_versions=(0,)
    )
    return Piece(0, TokenRequest((1,), SamplingParams()), text, output, is_first=False)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_parser_of_the_server_reads_the_calls(name: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is 12+34?"}]
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "stream": stream})
    reply = ChatReply(body, str, get_tool_parser(name))
    said = piece(CALLS[name])
    (answer,) = reply.chunks(said) if stream else [reply.whole([said], 1)]
    choice = answer["choices"][0]
    message: dict[str, Any] = choice["delta" if stream else "message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "12+34"}'}
    assert message["content"] == (None if name == "llama3-json" else "I calculate.")
    assert choice["finish_reason"] == "tool_calls"


def test_the_chat_template_shows_the_parser() -> None:
    shown = {
        "r1": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}",
        "llama3-json": """{{ '{"name": "' + tool_call.name + '", "parameters": ' }}""",
        "hermes": """{{ '<tool_call>' }} with "parameters": in the schemas""",
    }
    for name, template in shown.items():
        assert parser_name_of(template) == name


def test_every_parser_that_reads_text_can_be_chosen() -> None:
    assert sorted(TOOL_PARSERS) == sorted(name for name in PARSERS if get_tool_parser(name).reads_text)
