"""Checks the JSON schemas of a request before an engine makes a grammar of them."""

from __future__ import annotations

from typing import Any

from policies.openai.limits import MAX_SCHEMA_DEPTH
from policies.openai.protocol import OpenAIError


def check_schema(schema: Any, param: str) -> None:
    """Raise ``OpenAIError``, with ``param``, for a schema that an engine must not get."""
    _check_depth(schema, param, depth=0)


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
