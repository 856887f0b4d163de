"""HTTP for the policy server: one limit of the body, errors in OpenAI's form, answers whole or as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from ray import serve
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from actors.served_agents.protocols import ServedAgents
from actors.served_agents.recorder import RECORDED_HEADER, may_be_recorded
from actors.serving.access import Access, AccessControl
from actors.serving.errors import error_response, reject
from actors.serving.events import EVENTS, event
from actors.serving.intake import AdmissionPacing, HttpMiddleware
from actors.serving.pinned import PinnedClient
from actors.serving.responses_socket import ResponsesSocket
from actors.serving.stored_responses import SharedResponses
from environments.command_name import command_name
from environments.data.recordings import Recordings
from environments.errors import TroupeError
from policies.agent_api.context import SESSION_HEADER, IdempotencyKey, RequestContext
from policies.model_api.dialects.base import DONE, Dialect, Json
from policies.model_api.dialects.errors import openai_error
from policies.model_api.errors import RequestError, invalid_body
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.limits import MAX_BODY_BYTES, MAX_BODY_SECONDS


class BodyLimit(HttpMiddleware):
    """Reads the body of a request before anything else does, and ends those too large or too slow."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(MAX_BODY_SECONDS):
                body = await _body(scope, receive)
        except TimeoutError:
            error = RequestError(f"The body took more than {MAX_BODY_SECONDS} s.", status=408)
            await reject(error, scope, receive, send)
        except RequestError as error:
            await reject(error, scope, receive, send)
        else:
            whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return whole.pop() if whole else await receive()

            await self._app(scope, replay, send)


async def _body(scope: Scope, receive: Receive) -> bytes:
    declared = dict(scope["headers"]).get(b"content-length", b"")
    _check_size(int(declared) if declared.isdigit() else 0)
    parts = bytearray()
    while True:
        message = await receive()
        parts += message.get("body", b"")
        _check_size(len(parts))
        if not message.get("more_body", False):
            return bytes(parts)


def _check_size(number: int) -> None:
    if number > MAX_BODY_BYTES:
        raise RequestError(f"The body is larger than {MAX_BODY_BYTES} bytes: send less.", status=413)


http = FastAPI(title="Troupe policy server")
http.add_middleware(BodyLimit)
http.add_middleware(AccessControl)
http.add_middleware(AdmissionPacing)
http.add_middleware(ResponsesSocket)  # the last one comes first


@http.exception_handler(TroupeError)
@http.exception_handler(Exception)  # clients expect this form too; Starlette writes the traceback to the log
async def _error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error, request.scope["path"])


@http.exception_handler(RequestValidationError)
async def _validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    kind = request.headers.get("content-type", "nothing").partition(";")[0].strip().lower()
    if request.method == "POST" and not kind.endswith("json"):
        unread = RequestError(
            f"The body is sent as {kind[:50]!r}: send JSON, with Content-Type: application/json.", status=415
        )
        return await _error(request, unread)
    return await _error(request, invalid_body(error.errors()))


@http.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Unknown addresses and methods, and bodies that cannot be read."""
    if error.status_code == 404:
        served = ", ".join(sorted({route.path for route in http.routes if isinstance(route, APIRoute)}))
        return await _error(request, RequestError(f"Nothing is served here. What is: {served}.", status=404))
    return await _error(request, RequestError(f"{error.detail}.", status=error.status_code))


class Replica(Protocol):
    """Parts of a ``PolicyServer`` that its routes need."""

    access: Access
    openai: OpenAIFrontend
    pinned: Mapping[str, PinnedClient]
    """Versions beside the present one, by name."""
    agents: ServedAgents
    responses: SharedResponses
    """Responses of the policy, which are found at the same addresses as those of agents."""
    recordings: Recordings | None


def replica() -> Replica:
    """The replica that answers here."""
    return serve.get_replica_context().servable_object


def request_context(request: Request) -> RequestContext:
    """Read the headers of a message: its owner, its session and its idempotency key."""
    headers = request.headers
    key = headers.get("idempotency-key")
    return RequestContext(
        owner=request.state.caller.name or "",
        session=headers.get(SESSION_HEADER),
        keeps_history=True,
        idempotency=None if key is None else IdempotencyKey(key),
        may_be_recorded=may_be_recorded(request),
    )


async def respond(
    parts: AsyncGenerator[Json, None], stream: bool | None, dialect: Dialect | None = None
) -> Response:
    """Respond with a JSON body, or with server-sent events, and the policy's version in a header.

    Errors before the first part become an HTTP status. Those behind it have the form of ``dialect``, which is
    OpenAI's chat where there is none.
    """
    first = await anext(parts)
    headers = {"x-policy-version": str(first["policy_version"])}
    recorded = first.get("recorded", first.get("response", {}).get("recorded"))
    if recorded is not None:
        headers[RECORDED_HEADER] = "yes" if recorded else "no"
    if dialect is not None and dialect.dropped:
        headers["x-dropped-fields"] = ", ".join(dialect.dropped)
    if stream:
        return _EventStream(_events(first, parts, dialect), parts, headers)
    await parts.aclose()
    return _Whole(first, headers=headers)


class _Whole(JSONResponse):
    """A JSON body, in ASCII where a call's arguments have half a surrogate pair, which has no UTF-8."""

    def render(self, content: Json) -> bytes:
        try:
            return super().render(content)
        except UnicodeEncodeError:
            return json.dumps(content).encode()


class _EventStream(StreamingResponse):
    """Server-sent events. Requests of clients that have disconnected are aborted."""

    def __init__(
        self, texts: AsyncIterator[str], rest: AsyncGenerator[Json, None], headers: dict[str, str]
    ) -> None:
        super().__init__(texts, headers=headers, media_type=EVENTS)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)


async def _events(first: Json, rest: AsyncIterator[Json], dialect: Dialect | None) -> AsyncIterator[str]:
    yield event(first)
    try:
        async for part in rest:
            yield event(part)
    except TroupeError as error:  # the status is sent already: OpenAI clients look for an error in the events
        yield event((openai_error if dialect is None else dialect.error)(error)[1])
        return
    terminator = DONE if dialect is None else dialect.terminator
    if terminator is not None:
        yield f"data: {terminator}\n\n"


def welcome_text(models: Sequence[str], url: str) -> str:
    """The body of ``GET /``, for people who open the address in a browser.

    The page of a run is not here: it shows training data, and lies in a folder that a replica may not reach.
    """
    return f"""\
Troupe serves {", ".join(models)} to OpenAI clients at {url}.

Talk to them, and look at a run, in the browser: {command_name("view")} RUN --server {url}
"""
