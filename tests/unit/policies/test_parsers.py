# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from environments.errors import ConfigError
from environments.tools import ToolCall
from policies.agents.parsers import TEXT_PARSERS, get_tool_parser

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
        ('{"name": "python", "arguments": ""}', {}),
        ('{"name": "python", "arguments": " \\n"}', {}),
        ('{"name": "python", "arguments": "null"}', {}),
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


NO_NUMBERS = ["NaN", "-Infinity", "1e999", "[-1e999]", '{"y": Infinity}']


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_numbers_that_json_has_not_make_a_call_invalid(number: str) -> None:
    arguments = f'{{"x": {number}}}'
    texts = {
        "qwen": block(f'{{"name": "f", "arguments": {arguments}}}'),
        "r1": r1_call("f", arguments),
        "llama3-json": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
    }
    for name, text in texts.items():
        (call,) = get_tool_parser(name).parse(text)
        assert call.name == "invalid_tool_call"
        assert "no number of JSON" in call.arguments["error"]
    quoted = json.dumps({"name": "f", "arguments": arguments})
    assert [call.name for call in get_tool_parser("qwen").parse(block(quoted))] == ["invalid_tool_call"]


MARKS = [
    "</tool_call>",
    "<tool_call>",
    '<tool_call>{"name": "clock"}</tool_call>',
    "<｜tool▁call▁end｜>",
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "[TOOL_CALLS]clock[ARGS]{}",
    "<|python_tag|>",
    "</think>",
]


@pytest.mark.parametrize("mark", MARKS)
def test_marks_within_a_json_string_are_a_part_of_it(mark: str) -> None:
    arguments = json.dumps({"t": f"a {mark} b"})
    texts = {
        "qwen": block(f'{{"name": "w", "arguments": {arguments}}}'),
        "r1": f"{BEGIN}{r1_call('w', arguments)}{END}",
        "deepseek-v3": f"{BEGIN}<｜tool▁call▁begin｜>w<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>{END}",
        "llama3-json": f'{{"name": "w", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "w", "arguments": {arguments}}}]',
    }
    for name, text in texts.items():
        if name == "llama3-json" and mark == "<|python_tag|>":
            continue  # a control token, which no model writes within a string
        assert get_tool_parser(name).split(f"Look.{text}" if name != "llama3-json" else text) == (
            "" if name == "llama3-json" else "Look.",
            [ToolCall("w", {"t": f"a {mark} b"})],
        )


GOOD = '{"name": "clock", "arguments": {}}'


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (f"{GOOD}\n{GOOD}", ["clock", "clock"]),
        (f"[{GOOD}, {GOOD}]", ["clock", "clock"]),
        (f"[{GOOD}]\n{GOOD}", ["clock", "clock"]),
        ("[]", ["invalid_tool_call"]),
        (f"[{GOOD}, 3]", ["clock", "invalid_tool_call"]),
        (f"[{GOOD} {GOOD}]", ["clock", "invalid_tool_call"]),
        (f"{GOOD}\n{{", ["clock", "invalid_tool_call"]),
        (f"{GOOD}\n{GOOD} so", ["clock", "invalid_tool_call"]),
        (f"{GOOD} so", ["invalid_tool_call"]),
        (f"{GOOD}}}", ["invalid_tool_call"]),
    ],
)
def test_block_may_hold_several_calls(body: str, names: list[str]) -> None:
    assert [call.name for call in get_tool_parser("qwen").parse(block(body))] == names


def test_call_that_was_cut_does_not_hide_the_good_one_before_it() -> None:
    good = block(GOOD)
    for size in range(1, len(good)):
        cut = good[:size]
        rest, calls = get_tool_parser("qwen").split(f"I look. {good} {cut}")
        assert calls == [ToolCall("clock", {})]
        assert rest == f"I look.  {cut}"


def test_unclosed_call_does_not_hide_the_next_one() -> None:
    text = f"<tool_call>{GOOD}\n{block(GOOD)}"
    assert [call.name for call in get_tool_parser("qwen").parse(text)] == ["invalid_tool_call", "clock"]


def test_nothing_within_an_unreadable_string_is_run() -> None:
    inner = block('{"name": "delete", "arguments": {}}')
    text = f'<tool_call>{{"name": "write", "arguments": {{"text": "{inner}"}}}}</tool_call>'
    assert [call.name for call in get_tool_parser("qwen").parse(text)] == ["invalid_tool_call"]


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


def test_bare_function_is_explained_as_a_tool() -> None:
    parser = get_tool_parser("hermes-brief")
    assert parser.get_tool_prompt([CLOCK["function"]]) == parser.get_tool_prompt([CLOCK])


@pytest.mark.parametrize("name", TEXT_PARSERS)
def test_without_tools_there_is_no_prompt(name: str) -> None:
    assert get_tool_parser(name).get_tool_prompt([]) == ""


def test_unknown_parser_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"parser_name='qwem'.*hermes.*qwen"):
        get_tool_parser("qwem")


@pytest.mark.parametrize("name", ["r1", "llama3-json", "mistral", "qwen3-coder"])
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
def test_llama_answer_that_is_one_object_is_a_call(text: str) -> None:
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


def test_llama_call_may_follow_a_text_by_its_tag() -> None:
    text = 'I look. <|python_tag|>{"name": "clock", "parameters": {}}'
    assert get_tool_parser("llama3-json").split(text) == ("I look. ", [ToolCall("clock", {})])


# --- Mistral


def mistral_calls(text: str) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in get_tool_parser("mistral").parse(text)]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}, "id": "9"}]',
        'So.[TOOL_CALLS] [{"name": "a", "arguments": "{\\"x\\": 1}"},\n{"name": "b"}] ',
        '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}',
        '[TOOL_CALLS]a[CALL_ID]123abc[ARGS]{"x": 1}\n[TOOL_CALLS]b{}',
    ],
)
def test_mistral_calls_are_read_in_both_forms(text: str) -> None:
    assert mistral_calls(text) == [("a", {"x": 1}), ("b", {})]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[TOOL_CALLS][{"name": "a", "arguments": {}}, {"na', ["a", "invalid_tool_call"]),
        ('[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": ', ["a", "invalid_tool_call"]),
        ("[TOOL_CALLS]a[ARGS]{oops}[TOOL_CALLS]b[ARGS]{}", ["invalid_tool_call", "b"]),
        ("[TOOL_CALLS]", ["invalid_tool_call"]),
        ("[TOOL_CALLS]a", ["invalid_tool_call"]),
        ('[{"name": "a", "arguments": {}}]', []),
    ],
)
def test_malformed_mistral_call_does_not_hide_the_others(text: str, names: list[str]) -> None:
    assert [name for name, _ in mistral_calls(text)] == names


# --- DeepSeek V3.1


def test_deepseek_calls_are_read_without_a_fence() -> None:
    first = '<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "1"}<｜tool▁call▁end｜>'
    text = f"{BEGIN}{first}<｜tool▁call▁begin｜>clock<｜tool▁sep｜><｜tool▁call▁end｜>{END}"
    rest, calls = get_tool_parser("deepseek-v3").split(f"I look. {text}")
    assert calls == [ToolCall("calculator", {"expression": "1"}), ToolCall("clock", {})]
    assert rest == "I look. "


def test_cut_r1_call_does_not_hide_the_good_one() -> None:
    text = f"{BEGIN}{r1_call('clock', '{}')}\n{r1_call('clock', '{}')[:-30]}"
    assert [call.name for call in get_tool_parser("r1").parse(text)] == ["clock", "invalid_tool_call"]


# --- Qwen3-Coder

TYPED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "sure": {"type": "boolean"},
                "rows": {"type": "array"},
                "more": {"$ref": "#/$defs/More"},
                "color": {"$ref": "#/$defs/Color"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "null"]},
                "level": {"enum": [1, 2]},
                "loop": {"$ref": "#/$defs/Loop"},
                "free": {},
            },
            "$defs": {
                "More": {"type": "object"},
                "Color": {"enum": ["1", "2"]},
                "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
            },
        },
    },
}


def coder(**parameters: str) -> str:
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def coder_calls(text: str, schemas: Any = (TYPED,)) -> list[tuple[str, Any]]:
    parser = get_tool_parser("qwen3-coder").for_tools(schemas)
    return [(call.name, call.arguments) for call in parser.parse(text)]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "3", "3"),
        ("text", " a\n\n b ", " a\n\n b "),
        ("text", "", ""),
        (
            "text",
            'say "</parameter>" & </function></tool_call> <b>',
            'say "</parameter>" & </function></tool_call> <b>',
        ),
        ("count", "3", 3),
        ("count", " -3\n", -3),
        ("share", "1e-2", 0.01),
        ("sure", "True", True),
        ("sure", "false", False),
        ("rows", '[1, {"a": "</parameter>"}]', [1, {"a": "</parameter>"}]),
        ("more", '{"a": null}', {"a": None}),
        ("color", "1", "1"),
        ("maybe", "null", None),
        ("maybe", "7", 7),
        ("either", "null", None),
        ("either", "7", "7"),
        ("level", "2", 2),
        ("loop", "true", True),
        ("free", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_qwen3_coder_values_have_the_types_of_the_schema(name: str, written: str, value: Any) -> None:
    assert coder_calls(coder(**{name: written})) == [("f", {name: value})]
    assert coder_calls(coder(**{name: written}), ()) == [("f", {name: written})]


@pytest.mark.parametrize(
    "value", [("count", "three"), ("share", "NaN"), ("share", "1e999"), ("rows", "[1"), ("sure", "")]
)
def test_qwen3_coder_value_of_another_type_is_explained(value: tuple[str, str]) -> None:
    ((name, arguments),) = coder_calls(coder(**dict([value])))
    assert name == "invalid_tool_call"
    assert f"The parameter {value[0]!r} of 'f'" in arguments["error"]


def test_qwen3_coder_calls_are_read_in_order() -> None:
    bare = "<function=g></function>\n<function=f><parameter=count>1</parameter></function></tool_call>"
    text = f"I call.\n{coder(text='a', count='2')} <tool_call>{bare}"
    assert coder_calls(text) == [("f", {"text": "a", "count": 2}), ("g", {}), ("f", {"count": 1})]


@pytest.mark.parametrize("close", ["", "\n</tool_call>"])
def test_qwen3_coder_call_without_its_opening_tag_is_read(close: str) -> None:
    bare = coder(text="a", count="2").removeprefix("<tool_call>").strip().removesuffix("</tool_call>").strip()
    parser = get_tool_parser("qwen3-coder").for_tools([TYPED])
    for text in (f"I call.\n{bare}{close}", f"I call.\n{bare}{close}\n{bare}{close}"):
        assert coder_calls(text) == [("f", {"text": "a", "count": 2})] * text.count("<function=")
        assert parser.split(text)[0].strip() == "I call."


def test_cut_qwen3_coder_call_without_opening_tag_is_explained() -> None:
    assert [name for name, _ in coder_calls("<function=f>\n<parameter=count>\n1")] == ["invalid_tool_call"]


def test_cut_qwen3_coder_call_does_not_hide_the_good_one() -> None:
    good = coder(text="a")
    for size in range(len("<tool_call>"), len(good)):
        names = [name for name, _ in coder_calls(good + good[:size])]
        assert names == ["f", "invalid_tool_call"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT_PARSERS)
def test_text_that_repeats_itself_is_read_in_no_time(name: str) -> None:
    parser = get_tool_parser(name)
    marks = [mark for mark in parser.openings if mark] + ["<tool_call>\n<function=f>", "[TOOL_CALLS]f", "{"]
    start = time.monotonic()
    for mark in marks:
        for filling in (" ", "\n", "a", mark, '"', "[", "</parameter>\n", "</tool_call>", "``` "):
            parser.split(mark + filling * 4000)
            parser.begun(mark + filling * 4000)
    assert time.monotonic() - start < 20  # what grows with the square of the length takes minutes
