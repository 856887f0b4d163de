"""The form that a client wants an answer to have: JSON by a schema, or the call of a tool.

Written as xgrammar's structural tags, which vLLM reads. Their format:
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from policies.agents.parsers import ToolParser
from policies.model_api.errors import InvalidRequestError
from policies.model_api.limits import MAX_STRUCTURE_CHARACTERS
from policies.model_api.protocol import ChatRequest, NamedTool, SamplingRequest
from policies.model_api.schemas import Json, check_schema, fault_of, without_annotations


def structure_of(body: SamplingRequest, parser: ToolParser) -> str | None:
    """Form that ``tool_choice``, ``response_format`` or ``structured_outputs`` asks for; ``None`` where they
    leave the answer free.

    Raises:
        RequestError: they contradict each other, name no tool of the request, or have schemas that are too
            long, too deep, or that the answer could break.
    """
    tools = forced_tools(body) if isinstance(body, ChatRequest) else []
    given = body.structured_outputs
    schemas = [("tools", function.get("parameters") or {}) for function in tools] + list(_schemas(body))
    params = [param for param, _ in _schemas(body)] + ["tool_choice"] * bool(tools)
    if given is not None and given.schema_ is None:
        params.append("structured_outputs")
    if not params:
        return None
    if len(params) > 1:
        raise InvalidRequestError(
            f"{params[0]} and {params[1]} ask for two forms: send one.", param=params[1]
        )
    # First of all: what follows walks through all of a schema, and megabytes of it would hold up the engine.
    _check_size(
        [schema for _, schema in schemas]
        + [given and (given.regex, given.choice), *(each["name"] for each in tools)],
        params[0],
    )
    for param, schema in schemas:
        check_schema(schema, param)
    if tools:
        calls = [_call(function, parser) for function in tools]
        form = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    elif schemas:
        form = _json(schemas[0][1])
    else:
        assert given is not None
        texts = [{"type": "const_string", "value": each} for each in given.choice or ()]
        form = {"type": "or", "elements": texts} if texts else {"type": "regex", "pattern": given.regex}
        if (fault := fault_of(form)) is not None:
            raise InvalidRequestError(f"{json.dumps(form)[:200]} is broken: {fault}.", param=params[0])
    return json.dumps({"type": "structural_tag", "format": form})


def _check_size(wanted: Any, param: str) -> None:
    try:
        size = len(json.dumps(wanted))
    except RecursionError as error:
        raise InvalidRequestError(
            "The answer's form is nested too deep: define its parts.", param=param
        ) from error
    if size > MAX_STRUCTURE_CHARACTERS:
        raise InvalidRequestError(
            f"The answer's form has {size} characters, and may have {MAX_STRUCTURE_CHARACTERS}.", param=param
        )


def forced_tools(body: ChatRequest) -> list[Json]:
    """The functions of which one has to be called; none where the model decides."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return []
    named: list[Json] = [tool["function"] for tool in body.tools or ()]
    if isinstance(choice, NamedTool):
        named = [function for function in named if function["name"] == choice.function.name]
    if not named:
        wanted = choice.function.name if isinstance(choice, NamedTool) else choice
        raise InvalidRequestError(
            f"tool_choice={wanted!r} needs such a function in tools.", param="tool_choice"
        )
    return named


def _schemas(body: SamplingRequest) -> Iterator[tuple[str, Json]]:
    """The schemas that the answer's text has to follow, each behind the field that asks for it."""
    wanted = body.response_format if isinstance(body, ChatRequest) else None
    if wanted is not None and wanted.type != "text":
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
        yield "response_format", schema
    if body.structured_outputs is not None and body.structured_outputs.schema_ is not None:
        yield "structured_outputs", body.structured_outputs.schema_


def _call(function: Json, parser: ToolParser) -> Json:
    begin, end = parser.around_arguments(function["name"])
    arguments = function.get("parameters") or {"type": "object"}
    content = {**_json(arguments), "style": parser.arguments_style}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _json(schema: Any) -> Json:
    """JSON that follows a schema, with at most one blank between its parts: a model that is free to write
    more may write nothing else until it has no tokens left.
    """
    return {"type": "json_schema", "json_schema": without_annotations(schema), "max_whitespace_cnt": 1}
