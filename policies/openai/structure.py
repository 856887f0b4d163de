"""The form that a client wants an answer to have: JSON by a schema, or the call of a tool.

Written as xgrammar's structural tags, which vLLM reads. Their format:
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
from typing import Any

from policies.agents.parsers import ToolParser
from policies.openai.limits import MAX_STRUCTURE_CHARACTERS
from policies.openai.protocol import ChatRequest, NamedTool, OpenAIError
from policies.openai.schemas import check_schema, without_annotations

Json = dict[str, Any]


def structure_of(body: ChatRequest, parser: ToolParser) -> str | None:
    """What ``tool_choice`` and ``response_format`` ask for; ``None`` where they leave the answer free.

    Raises:
        OpenAIError: they contradict each other, name no tool of the request, or have schemas that are too
            long, too deep, or that the answer could break.
    """
    tools = forced_tools(body)
    schema = _schema(body)
    if tools and schema is not None:
        raise OpenAIError(
            400, "tool_choice forces a call and response_format forbids it: send one.", param="tool_choice"
        )
    if tools:
        calls = [_call(function, parser) for function in tools]
        form = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    elif schema is not None:
        form = _json(schema)
    else:
        return None
    text = json.dumps({"type": "structural_tag", "format": form})
    if len(text) > MAX_STRUCTURE_CHARACTERS:
        raise OpenAIError(
            400,
            f"The answer's schemas have {len(text)} characters, and may have {MAX_STRUCTURE_CHARACTERS}.",
            param="tool_choice" if tools else "response_format",
        )
    # Not before: this walks through all of a schema, and megabytes of it would hold up the engine.
    for function in tools:
        check_schema(function.get("parameters") or {}, "tools")
    if schema is not None:
        check_schema(schema, "response_format")
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


def _schema(body: ChatRequest) -> Json | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_


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
