"""The gateway of a rollout actor's process: an HTTP server at which a rollout's program calls the policy."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.gateway.calls import ProgramCalls
from actors.serving.errors import HttpError, error_response
from actors.serving.events import EVENTS, event
from policies.gateway.answers import chunks_of, completion_of
from policies.gateway.calls import policy_call
from policies.gateway.session import Json, PolicyCall
from policies.model_api.errors import invalid_body
from policies.model_api.protocol import ChatRequest

HOST = "127.0.0.1"
"""Only programs of this machine reach it."""


class Gateway:
    """Answers the calls of all programs of this process, each by the session that its key opens."""

    def __init__(self) -> None:
        self._sessions: dict[str, ProgramCalls] = {}
        listening = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{listening.getsockname()[1]}"
        """Address without ``/v1``."""
        app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={Exception: _failed, 404: _not_found, 405: _not_found},
        )
        config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False)
        server = uvicorn.Server(config)
        serve = functools.partial(server.run, sockets=[listening])
        threading.Thread(target=serve, name="gateway", daemon=True).start()

    def open(self, calls: ProgramCalls) -> str:
        """Open a session; return the key by which its program calls."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = calls
        return key

    def close(self, key: str) -> None:
        """Let nobody call by ``key`` any more."""
        self._sessions.pop(key, None)

    def _session(self, request: Request) -> ProgramCalls:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if key not in self._sessions:
            raise HttpError(
                401,
                "This key opens no rollout that is in play: send the key of the client that the rollout "
                "function was given, as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.",
                code="invalid_api_key",
            )
        return self._sessions[key]

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "troupe"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        try:
            calls = self._session(request)
            body = ChatRequest.model_validate(json.loads(await request.body()))
            call = policy_call(body)
            completion = await _answered(request, calls, call, body)
        except ValidationError as error:
            return error_response(invalid_body(error.errors()))
        except json.JSONDecodeError as error:
            return error_response(HttpError(400, f"The body is no JSON: {error}."))
        except Exception as error:  # noqa: BLE001  # the program gets it, in OpenAI's form
            return error_response(error)
        if body.stream:
            return StreamingResponse(_events(completion, body.includes_usage), media_type=EVENTS)
        return JSONResponse(completion)


async def _answered(request: Request, calls: ProgramCalls, call: PolicyCall, body: ChatRequest) -> Json:
    """The completion with all choices, which are sampled one after the other."""
    answers = [await _answer(request, calls, call) for _ in range(body.num_choices)]
    completions = [completion_of(answer, body.model) for answer in answers]
    choices = [
        {**choice, "index": index} for index, each in enumerate(completions) for choice in each["choices"]
    ]
    counts = [each["usage"] for each in completions]
    usage = {name: sum(count[name] for count in counts) for name in counts[0]}
    return {**completions[0], "choices": choices, "usage": usage}


async def _answer(request: Request, calls: ProgramCalls, call: PolicyCall) -> Json:
    """The answer to a call; it stays for the next connection if this one is lost before."""
    waiting = calls.take(call)
    answer = asyncio.ensure_future(asyncio.wrap_future(waiting.answer))
    gone = asyncio.ensure_future(request.receive())  # the body is read, so what comes is the client's end
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            calls.abandon(waiting)
            raise HttpError(499, "The client has gone before it had its answer.")
        return answer.result()
    finally:
        gone.cancel()


async def _events(completion: Json, includes_usage: bool) -> AsyncIterator[str]:
    async for chunk in chunks_of(completion, includes_usage):
        yield event(chunk)
    yield "data: [DONE]\n\n"


async def _failed(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _not_found(_: Request, error: Exception) -> Response:
    return error_response(
        HttpError(404, "Nothing is here. A rollout's gateway has /v1/chat/completions and /v1/models.")
    )


@functools.cache
def gateway() -> Gateway:
    """The gateway of this process, which starts with the first rollout that needs it."""
    return Gateway()
