from __future__ import annotations

import json
from typing import Any

import pytest

from environments.errors import ConfigError
from policies.agents.parsers import get_tool_parser

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates arithmetic, with ½ and {braces}.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
CONVERT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "convert", "parameters": {"properties": {"amount": {}, "unit": {}}}},
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
NAMES = ["qwen", "hermes", "hermes-brief"]


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_read_in_order_among_other_text(name: str) -> None:
    first = block('{"name": "calculator", "arguments": {"expression": "1+1"}}')
    second = block('{"name": "clock", "arguments": {}}')
    calls = get_tool_parser(name).parse(f"Let me see.\n{first} and {second}\nDone.")
    assert [(call.name, call.arguments) for call in calls] == [
        ("calculator", {"expression": "1+1"}),
        ("clock", {}),
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["", "The answer is \\boxed{2}.", "</tool_call>", "tool_call"])
def test_text_without_a_call_has_none(name: str, text: str) -> None:
    assert get_tool_parser(name).parse(text) == []


def test_arguments_may_be_missing() -> None:
    (call,) = get_tool_parser("qwen").parse(block('{"name": "clock"}'))
    assert (call.name, call.arguments) == ("clock", {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (block('{"name": "calculator", "arguments": '), "not valid JSON"),
        (block(""), "not valid JSON"),
        (block("[" * 100_000), "not valid JSON"),
        (block('["calculator"]'), '"name"'),
        (block('{"arguments": {}}'), '"name"'),
        (block('{"name": 3, "arguments": {}}'), '"name"'),
        (block('{"name": "calculator", "arguments": "1+1"}'), "JSON object"),
        ('<tool_call>{"name": "clock", "arguments": {}}', "closing"),
        ("<tool_call>", "closing"),
    ],
)
def test_malformed_call_says_what_is_wrong_with_it(text: str, reason: str) -> None:
    (call,) = get_tool_parser("qwen").parse(text)
    assert call.name == "invalid_tool_call"
    assert reason in call.arguments["error"]


def test_malformed_call_does_not_hide_a_good_one() -> None:
    text = block("{") + block('{"name": "clock", "arguments": {}}')
    assert [call.name for call in get_tool_parser("qwen").parse(text)] == ["invalid_tool_call", "clock"]


@pytest.mark.parametrize("name", ["qwen", "hermes"])
def test_long_prompt_lists_one_schema_a_line(name: str) -> None:
    lines = get_tool_parser(name).get_tool_prompt([CALCULATOR, CLOCK]).splitlines()
    assert lines[0] == "# Tools"
    start, end = lines.index("<tools>"), lines.index("</tools>")
    assert [json.loads(line) for line in lines[start + 1 : end]] == [CALCULATOR, CLOCK]
    assert "½" in lines[start + 1]
    assert lines[-2] == '{"name": <function-name>, "arguments": <args-json-object>}'


def test_brief_prompt_is_one_line_a_tool() -> None:
    parser = get_tool_parser("hermes-brief")
    assert parser.get_tool_prompt([CALCULATOR]) == (
        "You can call calculator(expression) inside <tool_call></tool_call>."
    )
    assert parser.get_tool_prompt([CONVERT, CLOCK]) == (
        "You can call convert(amount, unit) inside <tool_call></tool_call>.\n"
        "You can call clock() inside <tool_call></tool_call>."
    )


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_there_is_no_prompt(name: str) -> None:
    assert get_tool_parser(name).get_tool_prompt([]) == ""


def test_unknown_parser_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"parser_name='qwem'.*hermes.*qwen"):
        get_tool_parser("qwem")
