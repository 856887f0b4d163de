"""Checks the JSON schemas of a request before an engine makes a grammar of them.

xgrammar leaves out in silence what its grammars cannot hold: here that is an error. Two things hold less than
they say: ``oneOf`` is read as ``anyOf``, and what a pattern looks ahead for is not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from policies.openai.limits import MAX_SCHEMA_DEPTH
from policies.openai.protocol import OpenAIError

Json = dict[str, Any]

NEVER_HELD = {
    *("not", "if", "uniqueItems", "contains", "minContains", "maxContains", "$dynamicRef"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these that a schema has is all that a grammar reads of it."""
SHOWS_TYPE = {"type", "properties", "additionalProperties", "items", "prefixItems"}
"""Without one of these, and of ``ALONE``, a grammar takes any value."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EITHER = (
    ("properties", "patternProperties", "propertyNames"),
    # The next two would hold, but took the engine more than 8 s for 700 of 1500 properties.
    ("properties", "minProperties"),
    ("properties", "maxProperties"),
    ("format", "pattern", "minLength"),
    ("format", "pattern", "maxLength"),
    *((bound, "multipleOf") for bound in BOUNDS),
)
"""Of each row, a grammar reads only the first that a schema has."""
LEAST = {"minLength", "minItems", "minProperties"}
"""Of these, 0 asks nothing."""
CONSTRAINTS = {*NEVER_HELD, *ALONE, *SHOWS_TYPE, *(keyword for row in EITHER for keyword in row)} | {
    *("required", "unevaluatedProperties", "unevaluatedItems", "minItems", "maxItems"),
}
"""All keywords that ask something of a value."""
FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
PLACES = ("$defs", "definitions")
"""Where a schema may define the inner ones that it names."""
BY_NAME = {"properties", "patternProperties", *PLACES}
"""Keywords that hold schemas by names."""
INNER = {
    *("items", "prefixItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("anyOf", "oneOf", "allOf", "propertyNames"),
}
"""Keywords that hold a schema or a list of them."""


def check_schema(schema: Any, param: str) -> None:
    """Raise ``OpenAIError``, with ``param``, for a schema that is too deep, or that answers could break."""
    _check_depth(schema, param, depth=0)
    for part in _schemas(schema):
        not_held = _not_held(part)
        for keyword in [each for each in part if each in not_held]:
            raise OpenAIError(
                400,
                f"An answer could break its schema, because the server cannot hold {keyword!r} in "
                f"{json.dumps(part)[:200]}: leave it out, or say it by other keywords.",
                param=param,
            )


def _check_depth(value: Any, param: str, depth: int) -> None:
    if depth > MAX_SCHEMA_DEPTH:
        raise OpenAIError(
            400,
            f"A schema has more than {MAX_SCHEMA_DEPTH} objects and lists within each other: define its "
            "inner parts under $defs, and name them by $ref.",
            param=param,
        )
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, param, depth + 1)


def _schemas(schema: Any) -> Iterator[Json]:
    """A schema and those in it, but not values and names that look like one."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        parts = list(value.values()) if keyword in BY_NAME and isinstance(value, dict) else value
        if keyword in BY_NAME | INNER:
            for part in parts if isinstance(parts, list) else [parts]:
                yield from _schemas(part)


def _not_held(schema: Json) -> set[str]:
    """The keywords of one schema that its grammar leaves out."""
    asked = {each for each in CONSTRAINTS & schema.keys() if not (each in LEAST and schema[each] == 0)}
    if (alone := next((keyword for keyword in ALONE if keyword in schema), None)) is not None:
        not_held = asked - {alone, "type"}
    elif SHOWS_TYPE & asked:
        rows = [[keyword for keyword in row if keyword in asked] for row in EITHER]
        not_held = (NEVER_HELD & asked).union(*(row[1:] for row in rows))
    else:
        not_held = asked
    if schema.get("uniqueItems") is False:
        not_held -= {"uniqueItems"}
    # Of these, some values are not read.
    ref, types = str(schema.get("$ref", "#")), _list(schema.get("type"))
    properties = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    unread = {
        "$ref": ref != "#" and not ref.startswith(tuple(f"#/{place}/" for place in PLACES)),
        "allOf": len(_list(schema.get("allOf"))) > 1,
        "format": "string" in types and schema.get("format") not in FORMATS,
        "multipleOf": "number" in types,
        "required": any(str(name) not in properties for name in _list(schema.get("required"))),
    }
    return not_held | {keyword for keyword in asked if unread.get(keyword)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
