"""The form that a client wants an answer to have: JSON by a schema, or the call of a tool.

Written as xgrammar's structural tags, which vLLM reads. Their format:
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from policies.agents.parsers import ToolParser
from policies.openai.limits import MAX_STRUCTURE_CHARACTERS
from policies.openai.protocol import ChatRequest, NamedTool, OpenAIError, SamplingRequest
from policies.openai.schemas import check_schema, fault_of, without_annotations

Json = dict[str, Any]


def structure_of(body: SamplingRequest, parser: ToolParser) -> str | None:
    """What ``tool_choice``, ``response_format`` and ``structured_outputs`` ask for; ``None`` where they leave
    the answer free.

    Raises:
        OpenAIError: they contradict each other, name no tool of the request, or have schemas that are too
            long, too deep, or that the answer could break.
    """
    tools = forced_tools(body) if isinstance(body, ChatRequest) else []
    schemas = [(function.get("parameters") or {}, "tools") for function in tools]
    calls = [_call(function, parser) for function in tools]
    forms = (
        {"tool_choice": calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}} if calls else {}
    )
    for param, schema in _schemas(body):
        schemas.append((schema, param))
        forms[param] = _json(schema)
    given = body.structured_outputs
    if given is not None and given.regex is not None:
        forms["structured_outputs"] = {"type": "regex", "pattern": given.regex}
    elif given is not None and given.choice is not None:
        texts = [{"type": "const_string", "value": each} for each in given.choice]
        forms["structured_outputs"] = {"type": "or", "elements": texts}
    if not forms:
        return None
    (param, form), *others = forms.items()
    if others:
        raise OpenAIError(400, f"{param} and {others[0][0]} ask for two forms: send one.", param=param)
    text = json.dumps({"type": "structural_tag", "format": form})
    if len(text) > MAX_STRUCTURE_CHARACTERS:
        raise OpenAIError(
            400,
            f"The answer's form has {len(text)} characters, and may have {MAX_STRUCTURE_CHARACTERS}.",
            param=param,
        )
    # Not before: this walks through all of a schema, and megabytes of it would hold up the engine.
    for schema, place in schemas:
        check_schema(schema, place)
    if not schemas and (fault := fault_of(form)) is not None:
        raise OpenAIError(400, f"{json.dumps(form)[:200]} is broken: {fault}.", param=param)
    return text


def forced_tools(body: ChatRequest) -> list[Json]:
    """The functions of which one has to be called; none where the model decides."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return []
    functions = [tool.get("function") for tool in body.tools or ()]
    named = [each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]
    if isinstance(choice, NamedTool):
        named = [function for function in named if function["name"] == choice.function.name]
    if not named:
        wanted = choice.function.name if isinstance(choice, NamedTool) else choice
        raise OpenAIError(400, f"tool_choice={wanted!r} needs such a function in tools.", param="tool_choice")
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
