# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

import json
from typing import Any

import pytest

from environments.errors import ConfigError
from environments.tools import ToolCall
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
    ("body", "arguments"),
    [
        ('{"name": "python", "parameters": {"code": "1"}}', {"code": "1"}),
        (r'{"name": "python", "arguments": "{\"code\": \"1\"}"}', {"code": "1"}),
        ('{"name": "python", "arguments": null}', {}),
        ('{"name": "python", "arguments": {"code": "a = 1\n\tb"}}', {"code": "a = 1\n\tb"}),
    ],
)
def test_arguments_are_read_in_the_shapes_that_models_write(body: str, arguments: dict[str, Any]) -> None:
    for parser, text in (("qwen", block(body)), ("llama3-json", body)):
        (call,) = get_tool_parser(parser).parse(text)
        assert (call.name, call.arguments) == ("python", arguments)


@pytest.mark.parametrize("arguments", ["3", "{}"])
def test_half_a_character_in_a_name_does_not_reach_the_messages(arguments: str) -> None:
    (call,) = get_tool_parser("qwen").parse(block(rf'{{"name": "\ud800", "arguments": {arguments}}}'))
    assert (call.name + call.arguments.get("error", "")).encode()


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


def test_a_bare_function_is_explained_as_a_tool() -> None:
    parser = get_tool_parser("hermes-brief")
    assert parser.get_tool_prompt([CLOCK["function"]]) == parser.get_tool_prompt([CLOCK])


@pytest.mark.parametrize("name", [*NAMES, "r1", "llama3-json"])
def test_without_tools_there_is_no_prompt(name: str) -> None:
    assert get_tool_parser(name).get_tool_prompt([]) == ""


def test_unknown_parser_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"parser_name='qwem'.*hermes.*qwen"):
        get_tool_parser("qwem")


@pytest.mark.parametrize("name", ["r1", "llama3-json"])
def test_every_prompt_has_all_schemas(name: str) -> None:
    lines = get_tool_parser(name).get_tool_prompt([CALCULATOR, CLOCK]).splitlines()
    assert [json.loads(line) for line in lines if line.startswith('{"type"')] == [CALCULATOR, CLOCK]


# --- DeepSeek-R1

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def r1_call(name: str, arguments: str) -> str:
    fenced = f"```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fenced}<｜tool▁call▁end｜>"


def test_r1_calls_are_read_in_order() -> None:
    first = r1_call("calculator", '{"expression": "1+1",\n "note": "```"}')
    text = f"I call both.\n{BEGIN}{first}\n{r1_call('clock', '{}')}{END}"
    assert [(call.name, call.arguments) for call in get_tool_parser("r1").parse(text)] == [
        ("calculator", {"expression": "1+1", "note": "```"}),
        ("clock", {}),
    ]


def test_r1_reads_a_fence_that_is_indented() -> None:
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n\n  ```json \n"
        '  {"zone": "UTC"}\n  ```\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    assert get_tool_parser("r1").parse(text) == [ToolCall("clock", {"zone": "UTC"})]


def test_r1_prompt_shows_a_call_that_its_parser_reads() -> None:
    prompt = get_tool_parser("r1").get_tool_prompt([CLOCK])
    shown = prompt[prompt.index(BEGIN) :].replace("<function-name>", "clock")
    (call,) = get_tool_parser("r1").parse(shown.replace("<args-json-object>", '{"zone": "UTC"}'))
    assert (call.name, call.arguments) == ("clock", {"zone": "UTC"})


@pytest.mark.parametrize("text", ["", "36", "```json\n{}\n```", '{"name": "clock", "parameters": {}}', CLOCK])
def test_r1_text_without_markers_has_no_call(text: Any) -> None:
    assert get_tool_parser("r1").parse(str(text)) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r1_call("clock", "{"), "not valid JSON"),
        (r1_call("clock", "[" * 100_000), "not valid JSON"),
        (r1_call("clock", "[]"), "arguments of 'clock'"),
        (r1_call("clock", "{}").removesuffix("<｜tool▁call▁end｜>"), "closing"),
        (r1_call("clock", "{}").replace("```json", ""), "```json"),
        (r1_call("clock", "{}").replace("<｜tool▁sep｜>", " "), "tool▁sep"),
        (BEGIN, "no <｜tool▁call▁begin｜>"),
        (f"{BEGIN}clock{END}", "no <｜tool▁call▁begin｜>"),
    ],
)
def test_malformed_r1_call_says_what_is_wrong_with_it(text: str, reason: str) -> None:
    (call,) = get_tool_parser("r1").parse(text)
    assert call.name == "invalid_tool_call"
    assert reason in call.arguments["error"]


# --- Llama 3


def llama_calls(text: str) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in get_tool_parser("llama3-json").parse(text)]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "calculator", "parameters": {"expression": "1;1"}}',
        '\n<|python_tag|>{"name": "calculator", "parameters": {"expression": "1;1"}} ',
        '{"type": "function", "name": "calculator", "parameters": {"expression": "1;1"}};',
        '{\n  "parameters": {"expression": "1;1"},\n  "name": "calculator"\n}',
        '{"name": "calculator", "arguments": {"expression": "1;1"}}',
    ],
)
def test_llama_answer_that_is_one_object_with_name_and_parameters_is_a_call(text: str) -> None:
    assert llama_calls(text) == [("calculator", {"expression": "1;1"})]


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama_calls_are_separated_by_semicolons(tag: str) -> None:
    text = tag + '{"name": "a", "parameters": {"x": "};{"}}; {"name": "b", "parameters": {}}'
    assert llama_calls(text) == [("a", {"x": "};{"}), ("b", {})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "36",
        '"name"',
        "The set {1, 2} has two elements.",
        "{x | x > 2}",
        "{1, 2}",
        '{"answer": 36}',
        '{"name": "Ada", "born": 1815}',
        '{"name": "Ada", "born": ',
        '[{"name": "clock", "parameters": {}}]',
        'I would call {"name": "clock", "parameters": {}}',
        '\\boxed{36} because {"name": "clock", "parameters": {}} said so',
        '```json\n{"name": "clock", "parameters": {}}\n```',
    ],
)
def test_llama_answer_that_merely_has_braces_is_no_call(text: str) -> None:
    assert llama_calls(text) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "clock", "parameters": {', "not valid JSON"),
        ('{"type": "function", "name": "clock", "parameters": {zone}}', "not valid JSON"),
        ("<|python_tag|>", "not valid JSON"),
        ("<|python_tag|>clock()", "not valid JSON"),
        ("<|python_tag|>3", '"name"'),
        ('<|python_tag|>{"parameters": {}}', '"name"'),
        ('{"name": 3, "parameters": {}}', '"name"'),
        ('{"name": "clock", "parameters": "now"}', "JSON object"),
        ('{"name": "clock", "parameters": {}} I wait.', "nothing but"),
        ('{"name": "clock", "parameters": {}} {"name": "clock", "parameters": {}}', "nothing but"),
    ],
)
def test_malformed_llama_call_says_what_is_wrong_with_it(text: str, reason: str) -> None:
    ((name, arguments),) = llama_calls(text)
    assert name == "invalid_tool_call"
    assert reason in arguments["error"]


@pytest.mark.parametrize("second", ["{", "36", '{"answer": 36}'])
def test_malformed_second_llama_call_does_not_hide_the_first(second: str) -> None:
    names = [name for name, _ in llama_calls('{"name": "clock", "parameters": {}}; ' + second)]
    assert names == ["clock", "invalid_tool_call"]
