"""Errors of requests, by their kinds, each with its HTTP status."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from environments.errors import ConfigError, PromptTooLongError, SamplerError, TroupeError


class RequestError(TroupeError):
    """A request that is not answered as it asks.

    Args:
        status: of HTTP, where it is not that of the kind of error.
        param: the field at fault.
        code: names the error for programs.
        retry_after: seconds after which the same request may be answered.
        unit: of what too much was asked: "requests" or "tokens".
    """

    status: int = 400

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        unit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status or self.status
        self.message, self.param, self.code, self.retry_after = message, param, code, retry_after
        self.unit = unit


class InvalidRequestError(RequestError):
    """The request asks for what cannot be."""


class NotFoundError(RequestError):
    """The request names what is not there."""

    status = 404


def unknown_model(message: str) -> NotFoundError:
    """The error of a request for a model or an agent that is not served."""
    return NotFoundError(message, param="model", code="model_not_found")


def no_earlier_response(name: str, most: int) -> InvalidRequestError:
    """The error of going on from a response that is not kept, as OpenAI's own."""
    return InvalidRequestError(
        f"There is no response {name!r} to go on from: {why_not_kept(most)} "
        "Send the whole conversation as input.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def why_not_kept(most: int) -> str:
    """The reasons for which a response is not there, where ``most`` of a key are kept."""
    return (
        "it was never made, made with store=false, deleted, made before this server was started, or "
        f"forgotten after {most} newer ones."
    )


class ConflictError(RequestError):
    """The state that the request goes on from is another one."""

    status = 409


class ServerError(RequestError):
    """The request is right, and the server has failed."""

    status = 500


class UnavailableError(ServerError):
    """The server cannot answer for now."""

    status = 503


def request_error(error: Exception) -> RequestError:
    """Any error as one of a request."""
    match error:
        case RequestError():
            return error
        case PromptTooLongError():
            return InvalidRequestError(str(error), code="context_length_exceeded")
        case ConfigError():
            return InvalidRequestError(str(error))
        case ValidationError():
            return invalid_body(error.errors())
        case SamplerError():
            return UnavailableError(str(error))
        case _:
            return ServerError(str(error))


# -- bodies that pydantic rejects -----------------------------------------------------------------------


def invalid_body(details: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """Error for the ``errors()`` of pydantic's or FastAPI's error about a body."""
    nearest = _nearest(details)
    places = [_place(detail) for detail in nearest]
    sentences = [
        f"{place or 'The body'}: {_complaint(detail)}" for place, detail in zip(places, nearest, strict=True)
    ]
    return InvalidRequestError(" ".join(sentences), param=places[0])


def _is_form(part: str | int) -> bool:
    """Return whether a part of a place is pydantic's word for one of several forms, and no field."""
    return isinstance(part, str) and (part == "str" or part[:1].isupper() or not part.isidentifier())


def _nearest(details: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Errors, for a field with several forms only those of the form that the value comes nearest to."""
    by_field: dict[tuple[str | int, ...], list[Mapping[str, Any]]] = {}
    for detail in details:
        field = tuple(itertools.takewhile(lambda part: not _is_form(part), detail["loc"]))
        by_field.setdefault(field, []).append(detail)
    nearest = []
    for errors in by_field.values():
        ranks = [(len(each["loc"]), not each["type"].endswith("_type")) for each in errors]
        nearest += [each for each, rank in zip(errors, ranks, strict=True) if rank == max(ranks)]
    return nearest


def _place(detail: Mapping[str, Any]) -> str | None:
    if detail["type"] == "json_invalid":
        return None
    path = [str(part) for part in detail["loc"] if not _is_form(part)]
    return ".".join(path[1:] if path[:1] == ["body"] else path) or None


def _complaint(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "extra_forbidden":
        return "this server does not support the field: leave it out."
    return str(detail["msg"]).removeprefix("Value error, ").rstrip(".") + "."
