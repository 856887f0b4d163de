"""Errors as clients get them over HTTP: the status of each kind, and OpenAI's form of the body."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from policies.model_api import errors as kinds
from policies.model_api.errors import RequestError, request_error

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


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON body that OpenAI clients expect of a failure."""
    known, status = request_error(error), status_of(error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = known.kind if isinstance(known, HttpError) and known.kind else "rate_limit_error"
    return {"error": {"message": known.message, "type": kind, "param": known.param, "code": known.code}}


def error_response(error: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    """The whole response to a request that has failed."""
    seconds = request_error(error).retry_after
    retry = {} if seconds is None else {"retry-after": str(seconds)}
    return JSONResponse(error_body(error), status_code=status_of(error), headers=retry | (headers or {}))


async def reject(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read: the connection ends."""
    await error_response(error, {"connection": "close"})(scope, receive, send)
