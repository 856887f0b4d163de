"""Checks the JSON schemas of a request before an engine makes a grammar of them.

xgrammar leaves out in silence what its grammars cannot hold: here that is an error. Three things hold less
than they say: ``oneOf`` is read as ``anyOf``, and ``uniqueItems`` and what a pattern looks ahead for are not
read.
``format`` is an annotation, as in JSON Schema by default: it holds where xgrammar knows it and no other
keyword asks something of the text.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from policies.model_api.errors import InvalidRequestError
from policies.model_api.limits import MAX_SCHEMA_DEPTH
from policies.model_api.messages import Json

NEVER_HELD = {
    *("not", "if", "contains", "minContains", "maxContains", "$dynamicRef"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these that a schema has is all that a grammar reads of it."""
SHOWS_TYPE = {"type", "properties", "additionalProperties", "items", "prefixItems"}
"""Keywords without one of which, or of ``ALONE``, a grammar takes any value."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EITHER = (
    ("properties", "patternProperties", "propertyNames"),
    # The next two would hold, but took the engine more than 8 s for 700 of 1500 properties.
    ("properties", "minProperties"),
    ("properties", "maxProperties"),
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    *((bound, "multipleOf") for bound in BOUNDS),
)
"""Rows of keywords, of each of which a grammar reads only the first that a schema has."""
MAX_MULTIPLE = 1024
"""Largest ``multipleOf`` that a grammar reads, of whole numbers."""
LEAST = {"minLength", "minItems", "minProperties"}
"""Keywords of which 0 asks nothing."""
CONSTRAINTS = {*NEVER_HELD, *ALONE, *SHOWS_TYPE, *(keyword for row in EITHER for keyword in row)} | {
    *("required", "unevaluatedProperties", "unevaluatedItems", "minItems", "maxItems"),
}
"""All keywords that ask something of a value."""
FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
PLACES = ("$defs", "definitions")
"""Keywords under which a schema may define the inner ones that it names."""
REF = re.compile(r"#$|#/(\$defs|definitions)/")
"""The beginning of a reference that a grammar can follow."""
BY_NAME = {"properties", "patternProperties", *PLACES}
"""Keywords that hold schemas by names."""
INNER = {
    *("items", "prefixItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("anyOf", "oneOf", "allOf", "propertyNames"),
}
"""Keywords that hold a schema or a list of them."""


def check_schema(schema: Any, param: str) -> None:
    """Raise ``RequestError``, with ``param``, for a schema that is too deep or broken, or that answers could
    break or would never end by.
    """
    _check_depth(schema, param, depth=0)
    for part in _schemas(schema):
        not_held = _not_held(part)
        for keyword in [each for each in part if each in not_held]:
            raise InvalidRequestError(
                f"An answer could break its schema, because the server cannot hold {keyword!r} in "
                f"{json.dumps(part)[:200]}: leave it out, or say it by other keywords.",
                param=param,
            )
    _check_grammar(schema, param)
    _check_ends(schema, param)


def without_annotations(schema: Any) -> Any:
    """The schema without each ``format`` that would keep a grammar from holding what else it asks."""
    if not isinstance(schema, dict):
        return schema
    changed = _with_inner(schema, without_annotations)
    unknown = schema.get("format") not in FORMATS or {"pattern", "minLength", "maxLength"} & schema.keys()
    if unknown and isinstance(schema.get("format"), str):
        del changed["format"]
    return changed


def _with_inner(schema: Json, change: Callable[[Any], Any]) -> Json:
    """The schema with each inner one changed."""
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, dict):
            changed[keyword] = {name: change(each) for name, each in value.items()}
        elif keyword in INNER and isinstance(value, dict):
            changed[keyword] = change(value)
        elif keyword in INNER and isinstance(value, list):
            changed[keyword] = list(map(change, value))
    return changed


def _check_depth(value: Any, param: str, depth: int) -> None:
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
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
    used = {each for each in CONSTRAINTS & schema.keys() if not (each in LEAST and schema[each] == 0)}
    if (alone := next((keyword for keyword in ALONE if keyword in schema), None)) is not None:
        not_held = used - {alone, "type"}
    elif SHOWS_TYPE & used:
        rows = [[keyword for keyword in row if keyword in used] for row in EITHER]
        not_held = (NEVER_HELD & used).union(*(row[1:] for row in rows))
    else:
        not_held = used
    # Of these, some values are not read.
    types = _list(schema.get("type"))
    properties = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    multiple = schema.get("multipleOf")
    is_read = not isinstance(multiple, int | float) or (multiple % 1 == 0 and multiple <= MAX_MULTIPLE)
    unread = {
        "$ref": not REF.match(str(schema.get("$ref", "#"))),
        "allOf": len(_list(schema.get("allOf"))) > 1,
        "multipleOf": "number" in types or not is_read,
        "required": any(str(name) not in properties for name in _list(schema.get("required"))),
    }
    return not_held | {keyword for keyword in used if unread.get(keyword)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_grammar(schema: Any, param: str) -> None:
    """Raise ``RequestError`` where no grammar can be made of a schema, with the part that is broken."""
    whole = {"type": "json_schema", "json_schema": schema}
    why = next(filter(None, map(_empty, _schemas(schema))), None) or fault_of(whole)
    if why is None:
        return
    for part in _schemas(schema):
        ref = part.get("$ref")
        cause = _empty(part) or fault_of({"type": "json_schema", "json_schema": _without_inner(part)})
        if isinstance(ref, str) and _target(schema, ref) is None:
            cause = f"there is no {ref}, which its $ref names"
        if cause is not None:
            raise InvalidRequestError(f"The schema {json.dumps(part)[:200]} is broken: {cause}.", param=param)
    raise InvalidRequestError(f"The schema is broken: {why}.", param=param)


def _empty(part: Json) -> str | None:
    """Fault of a schema that leaves nothing to choose from."""
    return next((f"{each} is empty" for each in ("type", *ALONE) if part.get(each) == []), None)


def fault_of(form: Json) -> str | None:
    """Fault that xgrammar finds in a form of which it can make no grammar."""
    try:
        import xgrammar
    except ModuleNotFoundError:  # the engine is one of the user's own, and reads the form by itself
        return None
    try:
        xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    except (RuntimeError, ValueError) as error:
        return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip().rstrip(".")
    return None


def _without_inner(schema: Json) -> Json:
    """The schema alone: with any value in the place of each inner one."""
    alone = _with_inner(schema, lambda inner: True)
    return {keyword: value for keyword, value in alone.items() if keyword not in ("$ref", *PLACES)}


def _target(schema: Any, ref: str) -> Any:
    """Part that a reference names; ``None`` if there is none."""
    found = schema
    for name in unquote(ref).removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _check_ends(schema: Any, param: str) -> None:
    """Raise ``RequestError`` for a part that no finite value follows: each would have to hold another one."""
    parts: dict[int, Json] = {}
    todo = [schema]
    waiting: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    """Needs of others that a part meets, by the part: each by its owner and its number."""
    unmet: dict[int, set[int]] = {}
    while todo:
        for part in _schemas(todo.pop()):
            if id(part) in parts:
                continue
            parts[id(part)] = part
            needs = [need for need in _needs(part, schema) if all(isinstance(each, dict) for each in need)]
            unmet[id(part)] = set(range(len(needs)))
            for number, need in enumerate(needs):
                todo += need
                for each in need:
                    waiting[id(each)].append((id(part), number))
    ending = [each for each, needs in unmet.items() if not needs]
    while ending:
        for owner, number in waiting.pop(ending.pop(), ()):
            if number in unmet[owner]:
                unmet[owner].discard(number)
                ending += [] if unmet[owner] else [owner]
    for each, open_needs in unmet.items():
        if open_needs:
            raise InvalidRequestError(
                f"No answer can follow {json.dumps(parts[each])[:200]} to its end, because its $ref leads "
                "back to it: let the property be optional, the list be empty, or anyOf have another choice.",
                param=param,
            )


def _needs(part: Json, schema: Any) -> Iterator[list[Any]]:
    """Groups of schemas: each value of ``part`` holds a value of one of every group."""
    keyword = next((each for each in ALONE if each in part), None)
    properties = part["properties"] if isinstance(part.get("properties"), dict) else {}
    prefix, least = _list(part.get("prefixItems") or []), part.get("minItems")
    if keyword == "$ref":
        yield [_target(schema, str(part["$ref"]))]
    elif keyword in ("anyOf", "oneOf"):
        yield _list(part[keyword])
    elif keyword == "allOf":
        yield from ([each] for each in _list(part[keyword]))
    elif keyword is None and len(_list(part.get("type"))) == 1:
        for name in _list(part.get("required")):
            if str(name) in properties:
                yield [properties[str(name)]]
        if part.get("minProperties") and not properties:
            yield [part.get("additionalProperties")]
        if isinstance(least, int):
            yield from ([each] for each in prefix[:least])
            if least > len(prefix):
                yield [part.get("items")]
