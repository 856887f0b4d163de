"""The form of an answer: what clients ask for by ``tool_choice`` and ``response_format``."""

from __future__ import annotations

import json
import re
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies.agents.parsers import TEXT_PARSERS, get_tool_parser
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError
from policies.model_api.protocol import ChatRequest
from policies.model_api.structure import structure_of

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


@pytest.mark.parametrize("name", TEXT_PARSERS)
def test_forced_call_is_one_that_the_parser_reads(name: str) -> None:
    parser = get_tool_parser(name).for_tools(TOOLS)
    twelve, nothing = (
        ("<parameter=a>\n12\n</parameter>", "") if name == "qwen3-coder" else ('{"a": 12}', "{}")
    )
    begin, end = parser.around_arguments("add")
    text = f"{begin}{twelve}{end}"
    (call,) = parser.parse(text)
    assert (call.name, call.arguments) == ("add", {"a": 12})
    named = structure_of(asked(tools=TOOLS, tool_choice=ADD), parser)
    required = structure_of(asked(tools=TOOLS, tool_choice="required"), parser)
    assert allows(named, text) and allows(required, text)
    begin, end = parser.around_arguments("clock")
    assert allows(required, f"{begin}{nothing}{end}") and not allows(named, f"{begin}{nothing}{end}")
    assert not allows(required, "No call.") and not allows(required, text.replace("12", "true"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": ADD, "tools": TOOLS[1:]}, "tool_choice"),
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
def test_form_that_cannot_be_is_an_error_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        structure_of(asked(**fields), get_tool_parser("hermes"))
    assert (status_of(caught.value), caught.value.param) == (400, param)


def answer_form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def nested(levels: int) -> dict[str, Any]:
    """A schema of so many objects within each other."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_schema_that_would_hold_up_the_engine_is_an_error() -> None:
    parser = get_tool_parser("hermes")
    for levels in (34, 400, 900):
        tool = {"type": "function", "function": {"name": "add", "parameters": nested(levels)}}
        for fields in (answer_form(nested(levels)), {"tools": [tool], "tool_choice": "required"}):
            with pytest.raises(RequestError, match=r"more than 32 .* under \$defs") as caught:
                structure_of(asked(**fields), parser)
            assert (status_of(caught.value), caught.value.param) == (400, next(iter(fields)))
    assert structure_of(asked(**answer_form(nested(33))), parser)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/$defs/B", "$defs": {}}, "there is no #/$defs/B, which its $ref names"),
        ({"type": "string", "pattern": "("}, "parenthesis is not closed"),
        ({"type": "string", "pattern": "[a-"}, "Unclosed '['"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum greater than maximum"),
        ({"type": "string", "minLength": 5, "maxLength": 1}, "minLength 5 is greater than maxLength 1"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems is greater than maxItems"),
        ({"enum": []}, "enum is empty"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"type": []}, "type is empty"),
        ({"type": "nonsense"}, "Unsupported type"),
        ({"type": "object", "required": "a", "properties": {"a": {}}}, "required must be an array"),
    ],
)
def test_broken_schema_is_an_error_that_names_its_part(schema: dict[str, Any], words: str) -> None:
    names = [json.dumps({key: value for key, value in schema.items() if key != "$defs"})[1:-1]]
    inner = {"type": "object", "properties": {"x": {"type": "array", "items": schema}, "y": {}}, "$defs": {}}
    tool = {"type": "function", "function": {"name": "add", "parameters": inner}}
    for fields in (answer_form(schema), answer_form(inner), {"tools": [tool], "tool_choice": "required"}):
        with pytest.raises(RequestError, match=f"{re.escape(names[0])}.* is broken: ") as caught:
            structure_of(asked(**fields), get_tool_parser("hermes"))
        assert words in caught.value.message and "/project/" not in caught.value.message
        assert (status_of(caught.value), caught.value.param) == (400, next(iter(fields)))


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/A"}], "$defs": {"A": {"allOf": [{"$ref": "#"}]}}},
        {**NODE, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "string"}, {"$ref": "#"}], "minItems": 2},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A/x"}},
            "$defs": {"A": {"x": {"$ref": "#/$defs/A/x"}}},
        },
    ],
)
def test_schema_without_an_ending_answer_names_its_ref(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    for fields in (answer_form(schema), {"tools": [tool], "tool_choice": "required"}):
        with pytest.raises(RequestError, match=r"\$ref leads back to it") as caught:
            structure_of(asked(**fields), get_tool_parser("hermes"))
        assert (status_of(caught.value), caught.value.param) == (400, next(iter(fields)))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (NODE, '{"next": {"next": {}}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        (
            {
                "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}],
                "$defs": {"A": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
            },
            "[[null]]",
        ),
        ({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, "7"),
    ],
)
def test_schema_that_refers_to_itself_and_ends_is_followed(schema: dict[str, Any], text: str) -> None:
    assert allows(structure_of(asked(**answer_form(schema)), get_tool_parser("hermes")), text)


def test_answer_has_no_second_blank_between_its_parts() -> None:
    schema = {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}
    structure = structure_of(asked(**answer_form(schema)), get_tool_parser("hermes"))
    for text in ("[[true],[]]", "[ [ true, false ], [ ] ]"):
        assert allows(structure, text)
    assert not allows(structure, "[  [true]]") and not allows(structure, "[[true],\n\n[]]")


@pytest.mark.parametrize(
    ("schema", "said", "not_said"),
    [
        ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 9}, '"http://a"', '"http://abc"'),
        ({"type": "string", "format": "phone"}, '"+49 30"', "4930"),
        ({"type": "string", "format": "email", "pattern": "^a+$"}, '"aa"', '"b"'),
        ({"type": "string", "format": "date"}, '"2026-11-26"', '"today"'),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 2]", '["1"]'),
    ],
)
def test_format_is_an_annotation(schema: dict[str, Any], said: str, not_said: str) -> None:
    structure = structure_of(asked(**answer_form(schema)), get_tool_parser("hermes"))
    assert allows(structure, said) and not allows(structure, not_said)


def test_property_may_be_called_as_a_keyword() -> None:
    properties = {name: {"type": "string", "format": "phone"} for name in ("format", "enum", "pattern")}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    structure = structure_of(asked(**answer_form(schema)), get_tool_parser("hermes"))
    assert allows(structure, '{"format": "1", "enum": "2", "pattern": "3"}') and not allows(structure, "{}")


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("contains", {"type": "array", "contains": {"const": 7}}),
        ("not", {"type": "string", "not": {"const": "a"}}),
        ("if", {"type": "integer", "if": {"const": 1}, "then": {"const": 2}}),
        ("dependentRequired", {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}),
        ("maxLength", {"type": "string", "pattern": "a+", "maxLength": 2}),
        ("propertyNames", {"properties": {"a": {}}, "propertyNames": {"pattern": "^b$"}}),
        ("minProperties", {"properties": {"a": {}}, "minProperties": 1}),
        ("multipleOf", {"type": "number", "multipleOf": 0.5}),
        ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 7}),
        ("multipleOf", {"type": "integer", "multipleOf": 1025}),
        ("multipleOf", {"type": "integer", "multipleOf": 2.5}),
        ("minimum", {"minimum": 7}),
        ("minimum", {"anyOf": [{"type": "integer"}], "minimum": 7}),
        ("properties", {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}),
        ("allOf", {"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 7}]}),
        ("required", {"type": "object", "properties": {"b": {}}, "required": ["a"]}),
        (
            "maxLength",
            {"type": "object", "propertyNames": {"type": "string", "pattern": "a", "maxLength": 3}},
        ),
        ("$ref", {"$ref": "#/components/a", "components": {"a": {"type": "array"}}}),
        ("$ref", {"$ref": "https://json-schema.org/draft/2020-12/schema"}),
    ],
)
def test_keyword_that_would_not_hold_is_an_error(keyword: str, schema: dict[str, Any]) -> None:
    inner = {"type": "object", "properties": {"x": {"anyOf": [schema, {"type": "null"}]}}}
    for each in (schema, inner, {"$defs": {"x": schema}, "type": "object"}):
        with pytest.raises(RequestError, match=f"cannot hold '{re.escape(keyword)}'") as caught:
            structure_of(asked(**answer_form(each)), get_tool_parser("hermes"))
        assert (status_of(caught.value), caught.value.param) == (400, "response_format")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9, description="The rest.", default=9)
    legs: int = Field(multiple_of=2)


class Tree(BaseModel):
    kind: Literal["tree"] = "tree"
    branches: list[Tree] = Field(max_length=2, default=[])


class Ordinary(BaseModel):
    """What pydantic makes of usual fields."""

    model_config = ConfigDict(title="Ordinary", extra="forbid")

    format: str = Field(pattern="^a+$", examples=["aa"])
    pattern: Annotated[str, Field(min_length=1, max_length=9)] | None = None
    colour: Colour = Field(default=Colour.RED, description="Of the whole.")
    when: datetime
    known_by: UUID
    pair: tuple[int, str]
    price: Decimal
    part: Cat | Tree = Field(discriminator="kind")
    numbers: dict[str, float] = Field(min_length=1)
    named: dict[Colour, int]
    default: Any = {"not": {"uniqueItems": True}}


def test_schema_that_is_too_long_is_not_looked_through() -> None:
    schema = {"anyOf": [{"not": {}}] * 40_000}
    with pytest.raises(RequestError, match="characters, and may have 65536"):
        structure_of(asked(**answer_form(schema)), get_tool_parser("hermes"))


def test_ordinary_schemas_are_taken() -> None:
    strict = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "not": {"type": "string", "format": "email"},
            "contains": {"type": ["array", "null"], "items": {"$ref": "#/$defs/step"}, "uniqueItems": False},
            "rest": {"allOf": [{"$ref": "#"}], "title": "Of pydantic 1"},
            "size": {"type": "integer", "format": "int32"},
            "name": {"type": "string", "pattern": "^a", "minLength": 0},
        },
        "required": ["not", "contains"],
        "additionalProperties": False,
        "$defs": {"step": {"type": "string", "const": "go"}},
    }
    for schema in (Ordinary.model_json_schema(), strict, {}, {"type": "object"}):
        assert structure_of(asked(**answer_form(schema)), get_tool_parser("hermes"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": 5},
        {"type": "object", "properties": ["a"], "required": [{}]},
        {"type": {}, "format": {}, "$ref": [], "anyOf": 1, "$defs": None, "allOf": {}},
    ],
)
def test_what_is_no_schema_is_the_clients_fault(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot hold"):
        structure_of(asked(**answer_form(schema)), get_tool_parser("hermes"))


@pytest.mark.parametrize(
    "form", [{"type": "json_schema"}, {"type": "xml"}, {"type": "text", "json_schema": {"name": "x"}}, {}]
)
def test_response_format_that_does_not_exist_is_an_error(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="response_format"):
        asked(response_format=form)


def test_structure_is_json() -> None:
    structure = structure_of(asked(response_format={"type": "json_object"}), get_tool_parser("hermes"))
    assert json.loads(structure or "")["type"] == "structural_tag"
