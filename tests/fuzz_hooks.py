"""Steers the fuzzer past the front door: half of its requests name what is served. ``schemathesis`` loads it.

Names that it makes up are answered with 404 before anything else is looked at.
"""

from __future__ import annotations

import random
from typing import Any

import schemathesis

METHODS = {
    "/mcp": ("initialize", "tools/list", "tools/call", "ping"),
    "/a2a/{name}": ("SendMessage", "SendStreamingMessage", "GetTask", "ListTasks", "CancelTask"),
}
_random = random.Random(1)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Mostly the agent that is there."""
    if path_parameters and "name" in path_parameters and _random.random() < 0.8:
        path_parameters["name"] = "calculator"
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A model that is served, and a method of the protocol, in most bodies that have one."""
    path = context.operation.path
    if isinstance(body, dict) and _random.random() < 0.8:
        if isinstance(body.get("model"), str):
            body["model"] = _random.choice(["tiny", "tiny", "agent/calculator"])
        if path in METHODS and isinstance(body.get("method"), str):
            body["method"] = _random.choice(METHODS[path])
    return body
