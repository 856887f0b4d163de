"""Errors as clients get them: their form in each dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from policies.model_api.errors import request_error

Json = dict[str, Any]

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's names of errors by their status, but for those that all others of 400 and of 500 share."""
ANTHROPIC_NAMES = {
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "continue_final_message": "last message of the assistant",
}
"""Fields of Anthropic's clients by those of the chat request, which errors of the engine's side name."""
UNSUPPORTED: dict[str | None, Json] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}
"""Details by which Anthropic's clients go on without a field that is not served: a conversation that the
server holds, by which their own tool loop sends only what is new."""


def status_of(error: Exception) -> int:
    """The HTTP status of an error, whatever it is."""
    return request_error(error).status


def renamed(message: str, names: Mapping[str, str]) -> str:
    """The message with other names of fields; ``names`` has them by those of the chat request."""
    return re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], message)


def openai_error(error: Exception) -> tuple[int, Json]:
    """Status and body of a failure, as OpenAI's clients expect them."""
    known, status = request_error(error), status_of(error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = known.unit or "rate_limit_error"
    body = {"message": known.message, "type": kind, "param": known.param, "code": known.code}
    return status, {"error": body}


def anthropic_error(error: Exception) -> tuple[int, Json]:
    """Status and body of a failure, as Anthropic's clients expect them."""
    known, status = request_error(error), status_of(error)
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": UNSUPPORTED[known.param]} if known.param in UNSUPPORTED else {}
    message = renamed(known.message, ANTHROPIC_NAMES)
    return status, {"type": "error", "error": {"type": kind, "message": message, **details}}
