"""The form of an answer: what clients ask for by ``tool_choice`` and ``response_format``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from actors.settings import TOOL_PARSERS
from policies.agents.parsers import get_tool_parser
from policies.openai.protocol import ChatRequest, OpenAIError
from policies.openai.structure import structure_of

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "clock"}},
]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


def asked(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(
        {"model": "tiny", "messages": [{"role": "user", "content": "What?"}], **fields}
    )


def allows(structure: str | None, text: str) -> bool:
    """Whether an engine that keeps the structure can say ``text`` and end there."""
    import xgrammar

    assert structure is not None
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(structure)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(256)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ],
)
def test_most_answers_are_free(fields: dict[str, Any]) -> None:
    assert structure_of(asked(**fields), get_tool_parser("hermes")) is None


@pytest.mark.slow
def test_json_that_follows_the_schema_is_all_that_can_be_said() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER, "strict": True}}
    structure = structure_of(asked(response_format=form), get_tool_parser("hermes"))
    assert allows(structure, '{"a": 12}')
    for other in ("{}", '{"a": "12"}', "Twelve.", '{"a": 12} or so'):
        assert not allows(structure, other)
    anything = structure_of(asked(response_format={"type": "json_object"}), get_tool_parser("hermes"))
    assert allows(anything, '{"b": [1, null]}') and not allows(anything, "[1]")


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_forced_call_is_one_that_the_parser_reads(name: str) -> None:
    parser = get_tool_parser(name)
    begin, end = parser.around_arguments("add")
    text = f'{begin}{{"a": 12}}{end}'
    (call,) = parser.parse(text)
    assert (call.name, call.arguments) == ("add", {"a": 12})
    named = structure_of(asked(tools=TOOLS, tool_choice=ADD), parser)
    required = structure_of(asked(tools=TOOLS, tool_choice="required"), parser)
    assert allows(named, text) and allows(required, text)
    begin, end = parser.around_arguments("clock")
    assert allows(required, f"{begin}{{}}{end}") and not allows(named, f"{begin}{{}}{end}")
    assert not allows(required, "No call.") and not allows(required, text.replace("12", "true"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": ADD, "tools": TOOLS[1:]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tool_choice"),
        ({"tool_choice": ADD, "tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"title": "x" * 2**16}},
                }
            },
            "response_format",
        ),
    ],
)
def test_a_form_that_cannot_be_is_an_error_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        structure_of(asked(**fields), get_tool_parser("hermes"))
    assert (caught.value.status, caught.value.param) == (400, param)


def answer_form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def nested(levels: int) -> dict[str, Any]:
    """A schema of so many objects within each other."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_a_schema_that_would_hold_up_the_engine_is_an_error() -> None:
    parser = get_tool_parser("hermes")
    for levels in (34, 400):
        tool = {"type": "function", "function": {"name": "add", "parameters": nested(levels)}}
        for fields in (answer_form(nested(levels)), {"tools": [tool], "tool_choice": "required"}):
            with pytest.raises(OpenAIError, match=r"more than 32 .* under \$defs") as caught:
                structure_of(asked(**fields), parser)
            assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))
    assert structure_of(asked(**answer_form(nested(33))), parser)


@pytest.mark.parametrize(
    "form", [{"type": "json_schema"}, {"type": "xml"}, {"type": "text", "json_schema": {"name": "x"}}, {}]
)
def test_a_response_format_that_does_not_exist_is_an_error(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="response_format"):
        asked(response_format=form)


def test_a_structure_is_json() -> None:
    structure = structure_of(asked(response_format={"type": "json_object"}), get_tool_parser("hermes"))
    assert json.loads(structure or "")["type"] == "structural_tag"
