"""Responses to requests that have failed, in the form of the dialect that their path belongs to."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from policies.model_api.dialects.errors import anthropic_error, openai_error
from policies.model_api.dialects.responses import responses_error
from policies.model_api.errors import RequestError, request_error

MESSAGES_PATH, RESPONSES_PATH, MODELS_PATH = "/v1/messages", "/v1/responses", "/v1/models"
COMPACT_PATH = f"{RESPONSES_PATH}/compact"
FORMS = {MESSAGES_PATH: anthropic_error, RESPONSES_PATH: responses_error}
"""Forms of errors by path; OpenAI's everywhere else."""


def error_response(error: Exception, path: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The whole response to a request that has failed."""
    seconds = request_error(error).retry_after
    retry = {} if seconds is None else {"retry-after": str(seconds)}
    status, body = error_form(error, path)
    return JSONResponse(body, status_code=status, headers=retry | (headers or {}))


async def reject(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read: the connection ends."""
    await error_response(error, scope.get("path", ""), {"connection": "close"})(scope, receive, send)


def error_form(error: Exception, path: str) -> tuple[int, dict[str, Any]]:
    """Status of a failure, and the JSON body that a client of ``path`` expects of it."""
    form = next((form for start, form in FORMS.items() if f"{path}/".startswith(f"{start}/")), openai_error)
    return form(error)
