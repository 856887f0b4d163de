"""Errors as clients get them: the HTTP status of each kind, and its form in each dialect."""

from __future__ import annotations

from functools import partial
from typing import Any

from policies.model_api import errors as kinds
from policies.model_api.errors import RequestError, request_error

Json = dict[str, Any]

STATUSES: dict[type, int] = {
    RequestError: 400,
    kinds.InvalidRequestError: 400,
    kinds.NotFoundError: 404,
    kinds.ConflictError: 409,
    kinds.KeyReusedError: 422,
    kinds.RateLimitError: 429,
    kinds.ServerError: 500,
    kinds.NotInstalledError: 501,
    kinds.UnavailableError: 503,
    kinds.TimeLimitError: 504,
}
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


class HttpError(RequestError):
    """A request that HTTP itself rejects, before anything behind it sees the request.

    Args:
        kind: of requests that are too many, as OpenAI has it: "requests" or "tokens".
    """

    def __init__(self, status: int, message: str, kind: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.status, self.kind = status, kind

    def __reduce__(self) -> tuple[Any, ...]:
        # By itself an exception is made anew from its message alone, in another process.
        return partial(type(self), self.status), self.args, vars(self)


def status_of(error: Exception) -> int:
    """The HTTP status of an error, whatever it is."""
    known = request_error(error)
    if isinstance(known, HttpError):
        return known.status
    return next(STATUSES[kind] for kind in type(known).__mro__ if kind in STATUSES)


def openai_error(error: Exception) -> tuple[int, Json]:
    """Status and body of a failure, as OpenAI's clients expect them."""
    known, status = request_error(error), status_of(error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = known.kind if isinstance(known, HttpError) and known.kind else "rate_limit_error"
    body = {"message": known.message, "type": kind, "param": known.param, "code": known.code}
    return status, {"error": body}


def anthropic_error(error: Exception) -> tuple[int, Json]:
    """Status and body of a failure, as Anthropic's clients expect them."""
    known, status = request_error(error), status_of(error)
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": known.message}}
