"""Tool calls that are streamed while they grow."""

# ruff: noqa: RUF001  (DeepSeek writes its marks with a fullwidth bar)

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from environments.tools import ToolCall
from policies.agents.parsers import ToolParser, get_tool_parser
from policies.model_api.growing_calls import GrowingCalls, GrowingJson

ARGUMENTS = [
    '{"x": 1, "y": [true, null, -2.5e3], "t": "a \\"}]\\\\</tool_call>;{ b"}',
    "{}",
    '{"t": "é\\u00e9"}',
]


def hermes(*arguments: str) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {each}}}\n</tool_call>' for each in arguments)


def deepseek(*arguments: str) -> str:
    mark = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
    calls = [mark.replace("{}", each) for each in arguments]
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def bare_deepseek(*arguments: str) -> str:
    mark = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return (
        "<｜tool▁calls▁begin｜>"
        + "".join(mark.replace("{}", each) for each in arguments)
        + "<｜tool▁calls▁end｜>"
    )


def llama(*arguments: str) -> str:
    return "; ".join(f'{{"name": "f", "parameters": {each}}}' for each in arguments)


def mistral(*arguments: str) -> str:
    return "[TOOL_CALLS][" + ", ".join(f'{{"name": "f", "arguments": {each}}}' for each in arguments) + "]"


def new_mistral(*arguments: str) -> str:
    return "".join(f"[TOOL_CALLS]f[ARGS]{each}" for each in arguments)


FORMS = {
    "hermes": ("hermes", "I call. ", hermes),
    "one block": (
        "hermes",
        "I call. ",
        lambda *each: f"<tool_call>{llama(*each).replace('; ', ' ')}</tool_call>",
    ),
    "deepseek": ("r1", "I call. ", deepseek),
    "bare deepseek": ("deepseek-v3", "I call. ", bare_deepseek),
    "llama": ("llama3-json", "", llama),
    "llama's tag": ("llama3-json", "I call. ", lambda *each: "<|python_tag|>" + llama(*each)),
    "mistral": ("mistral", "I call. ", mistral),
    "new mistral": ("mistral", "I call. ", new_mistral),
}


def streamed(parser: ToolParser, pieces: list[str]) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    growing = GrowingCalls(parser)
    deltas = [growing.add(piece, is_last=False) for piece in pieces] + [growing.add("", is_last=True)]
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            assert call["index"] in (len(calls), len(calls) - 1)
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[-1]["arguments"] += call["function"]["arguments"]
    assert growing.num_complete <= len(calls)
    return content, calls, deltas


def split_anywhere(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(2 * len(text))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_calls_in_pieces_are_the_calls_of_the_whole(form: str, number: int) -> None:
    name, before, write = FORMS[form]
    parser, rng = get_tool_parser(name), random.Random(number)
    text = before + write(*ARGUMENTS[:number])
    rest, whole = parser.split(text)
    assert whole == [ToolCall("f", json.loads(each)) for each in ARGUMENTS[:number]]
    for _ in range(10):
        content, calls, _ = streamed(parser, split_anywhere(text, rng))
        assert [ToolCall(call["name"], json.loads(call["arguments"])) for call in calls] == whole
        assert content == rest.strip()


@pytest.mark.parametrize("form", FORMS)
def test_call_is_sent_by_its_name_and_then_as_it_grows(form: str) -> None:
    name, before, write = FORMS[form]
    text = before + write(json.dumps({"text": "word " * 50}))
    _, _, deltas = streamed(get_tool_parser(name), list(text))
    sent = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert sent[0]["function"]["name"] == "f"
    assert len(sent) > 200
    last = max(number for number, delta in enumerate(deltas) if delta.get("tool_calls"))
    assert last <= text.rindex("}") + 1


@pytest.mark.parametrize("name", ["hermes", "r1", "mistral", "qwen3-coder", "llama3-json"])
def test_text_is_sent_at_once(name: str) -> None:
    text = "The sign < is no tag, [1] no call, nor is <tool or {x}: so a < b."
    growing = GrowingCalls(get_tool_parser(name))
    sent = ""
    for number, char in enumerate(text):
        sent += growing.add(char, is_last=False)["content"]
        held = text[: number + 1].removeprefix(sent)
        assert not held.strip() or any(mark.startswith(held.strip()) for mark in growing._parser.openings)
    assert sent + growing.add("", is_last=True)["content"] == text


@pytest.mark.parametrize("cut", range(1, len(hermes("{}"))))
def test_cut_call_is_no_complete_one(cut: int) -> None:
    growing = GrowingCalls(get_tool_parser("hermes"))
    delta = growing.add(f"Good: {hermes('{}')}\n{hermes('{}')[:cut]}", is_last=True)
    begun = '"arguments": {' in hermes("{}")[:cut]
    assert len(delta["tool_calls"]) == 1 + begun
    assert growing.num_complete == 1 + ("{}" in hermes("{}")[:cut])
    rest = "" if begun else hermes("{}")[:cut].strip()
    if "{}" not in hermes("{}")[:cut]:
        assert "".join(delta["content"].split()) == "".join(f"Good:{rest}".split())


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense</tool_call> and more",
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "NaN"}</tool_call>',
        "<tool_call>",
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        " \n Just text. \n",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for seed in range(10):
        content, calls, _ = streamed(get_tool_parser("hermes"), split_anywhere(text, random.Random(seed)))
        assert (content, calls) == (text, [])


def test_call_whose_name_comes_last_is_sent_when_it_is_complete() -> None:
    text = '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>Done.'
    content, calls, _ = streamed(get_tool_parser("hermes"), list(text))
    assert (content, calls) == ("Done.", [{"name": "f", "arguments": '{"x": 1}'}])


def test_qwen3_coder_calls_are_sent_when_they_are_complete() -> None:
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    content, calls, deltas = streamed(get_tool_parser("qwen3-coder"), list(f"So. {call}\n{call}"))
    assert (content, calls) == ("So.", [{"name": "f", "arguments": '{"x": "1"}'}] * 2)
    assert sum(bool(delta.get("tool_calls")) for delta in deltas) == 2


class LineParser(ToolParser):
    """Nothing tells where its calls begin."""

    def parse(self, text: str) -> list[ToolCall]:
        return [ToolCall(line[1:], {}) for line in text.splitlines() if line.startswith("!")]

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return ""


def test_parser_of_ones_own_is_asked_at_the_end() -> None:
    assert streamed(LineParser(), list("!f\n!g"))[:2] == (
        "",
        [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": "{}"}],
    )
    assert streamed(LineParser(), ["No ", "call."])[:2] == ("No call.", [])


def test_line_break_within_a_string_is_sent_as_json_has_it() -> None:
    growing = GrowingJson()
    sent = "".join(map(growing.add, '{"a\t": "b\n\\"c", "d": [1,2]} and more'))
    assert json.loads(sent) == {"a\t": 'b\n"c', "d": [1, 2]}
    assert growing.has_ended


@pytest.mark.parametrize("number", ["NaN", "1e999", "nonsense", "-Infinity"])
def test_number_that_json_has_not_is_never_sent(number: str) -> None:
    growing = GrowingJson()
    assert "".join(map(growing.add, f'{{"a": 1, "b": {number}, "c": 2}}')) == '{"a": 1, "b": '
    assert not growing.has_ended
