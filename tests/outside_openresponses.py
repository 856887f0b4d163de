"""A client that takes nothing but Open Responses: ``outside_openresponses.py URL MODEL``.

It runs in the environment of ``outside_openresponses.txt``, whose types are made from the specification.
Prints the kinds of the items and events that it has got.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any, Union

import openresponses_types.types as specified
from pydantic import TypeAdapter

EVENT: Any = TypeAdapter(
    Union[tuple(each for name, each in vars(specified).items() if name.endswith("StreamingEvent"))]  # noqa: UP007
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}


def user(text: str) -> dict[str, str]:
    return {"type": "message", "role": "user", "content": text}


REQUESTS: list[dict[str, Any]] = [
    {"input": "Hello."},
    {"input": [user("Hello.")]},
    {"input": [{"type": "message", "role": "system", "content": "Be brief."}, user("Hello.")]},
    {"input": [user("I am Ada."), {"type": "message", "role": "assistant", "content": "Ada."}, user("Who?")]},
    {"input": "What is the weather?", "tools": [WEATHER], "max_tool_calls": 2, "metadata": {"a": "b"}},
    {"input": "What is the weather?", "reasoning": {"summary": "auto"}, "prompt_cache_key": "a"},
]


def answer(url: str, request: dict[str, Any]) -> specified.ResponseResource:
    with urllib.request.urlopen(post(url, request)) as response:
        return specified.ResponseResource.model_validate_json(response.read())


def events(url: str, request: dict[str, Any]) -> list[Any]:
    """The events of a stream, which end with the response."""
    with urllib.request.urlopen(post(url, {**request, "stream": True})) as response:
        data = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
    return [EVENT.validate_json(each) for each in data]


def post(url: str, request: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/responses", json.dumps(request).encode(), headers)


if __name__ == "__main__":
    url, model = sys.argv[1:]
    kinds = set()
    for request in REQUESTS:
        whole, streamed = answer(url, {"model": model, **request}), events(url, {"model": model, **request})
        assert streamed[-1].type == "response.completed" and whole.status == "completed"
        assert [each.sequence_number for each in streamed] == list(range(len(streamed)))
        kinds |= {each.type for each in (*whole.output, *streamed[-1].response.output, *streamed)}
    print(json.dumps(sorted(kinds)))
