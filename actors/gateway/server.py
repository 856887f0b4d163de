"""The gateway of a rollout actor's process: an HTTP server at which a rollout's program calls the policy."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.gateway.calls import ProgramCalls
from actors.gateway.client import MODEL
from actors.gateway.entries import ENTRIES_HEADER, Part
from actors.rollouts.player import NODE_ADDRESS
from actors.serving.errors import COMPACT_PATH, MESSAGES_PATH, MODELS_PATH, RESPONSES_PATH, error_response
from actors.serving.events import EVENTS, event
from actors.serving.keys import sent_keys, unknown_key
from actors.serving.responses_socket import ResponsesSocket
from environments.errors import TroupeError
from environments.messages import json_key
from policies.gateway.answers import chunks_of, completion_of
from policies.gateway.calls import policy_call
from policies.gateway.session import Json, PolicyCall
from policies.model_api.dialects.base import Chat, ChatReader, Dialect
from policies.model_api.dialects.messages import Messages, count_request
from policies.model_api.dialects.responses import Compact, Responses
from policies.model_api.errors import RequestError
from policies.model_api.protocol import ChatRequest
from policies.model_api.reply import usage_of

HOST = "127.0.0.1"
"""Only programs of this machine reach it."""
KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
"""Options by which a connection ends a minute after the machine at its other end has gone."""
RETRY_HEADER = "x-stainless-retry-count"
"""Number of times that a client of OpenAI or Anthropic has sent a request before."""
CALL_HEADER = "x-troupe-call"
"""Name of a request, the same each time that the session server sends it."""
DIALECTS: dict[str, type[Chat | Messages | Responses]] = {
    "/v1/chat/completions": Chat,
    MESSAGES_PATH: Messages,
    RESPONSES_PATH: Responses,
    COMPACT_PATH: Compact,
}
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"


@dataclass(frozen=True, slots=True)
class _Session:
    """A program's access: its calls, and its conversations by the ids of their responses."""

    calls: ProgramCalls
    conversations: dict[str, list[Json]] = field(default_factory=dict)
    items: dict[Hashable, Json] = field(default_factory=dict)
    """The items of the conversations, each once, though a client sends all of them with every call."""
    chats: ChatReader = field(default_factory=ChatReader)


class Gateway:
    """Answers the calls of all programs of this process, each by the session that its key opens."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        routes = [Route(path, self._answer, methods=["POST"]) for path in DIALECTS]
        routes.append(Route(COUNT_PATH, self._count, methods=["POST"]))
        self._app = application([*routes, Route(MODELS_PATH, self._models, methods=["GET"])])
        self.url = listen(self._app, HOST).url
        """Address without ``/v1``, for programs of this machine."""

    @functools.cached_property
    def remote_url(self) -> str:
        """The same for programs of other machines. Nothing listens there before somebody asks for it."""
        return listen(self._app, os.environ.get(NODE_ADDRESS, HOST)).url

    def serve(self, listening: socket.socket) -> Callable[[], None]:
        """Answer at another listening socket too, until the function that this returns is called."""
        return serve(self._app, listening).close

    def open(self, calls: ProgramCalls) -> str:
        """Open a session; return the key by which its program calls."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = _Session(calls)
        return key

    def close(self, key: str) -> None:
        """Let nobody call by ``key`` any more."""
        self._sessions.pop(key, None)

    def _session(self, request: Request) -> _Session:
        session = next(filter(None, map(self._sessions.get, sent_keys(request.headers))), None)
        if session is None:
            raise unknown_key(
                "This key opens no rollout that is in play: send that of the rollout function's client"
            )
        return session

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "troupe"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _count(self, request: Request) -> Response:
        """Count the tokens that a call of Anthropic's messages would read now."""
        session = self._session(request)
        counting = session.calls.take(policy_call(count_request(await body_of(request))), is_count=True)
        await settled(request, end_of(counting.answer))
        return JSONResponse(counting.answer.result())

    async def _answer(self, request: Request) -> Response:
        """Answer a call in the dialect of its path."""
        session = self._session(request)
        dialect = DIALECTS[request.scope["path"]](await body_of(request), session.chats)
        while isinstance(dialect, Responses) and (name := dialect.follows):
            dialect.follow(session.conversations.get(name))
        if isinstance(dialect, Responses) and dialect.body.generate is False:
            events, stream = dialect.prepared(), dialect.body.stream
        else:
            chat = dialect.chat_request()
            call, stream = policy_call(chat, dialect.dropped), chat.stream
            completion = await _completion(request, session.calls, call, chat)
            if stream:
                chunks = chunks_of(completion, chat.includes_usage)
                events = [part async for _, part in dialect.events(chunks)]
            else:
                events = [dialect.answer(completion)]
        if isinstance(dialect, Responses) and dialect.is_stored:
            session.conversations[dialect.response_id] = [
                session.items.setdefault(json_key(item), item) for item in dialect.conversation()
            ]
        if not stream:
            return _behind(JSONResponse(events[0]), request, session.calls)
        return _behind(Response(_stream(events, dialect), media_type=EVENTS), request, session.calls)


async def _completion(request: Request, calls: ProgramCalls, call: PolicyCall, body: ChatRequest) -> Json:
    """The completion with all choices, which are sampled one after the other."""
    answers: list[Json] = []
    name = request.headers.get(CALL_HEADER, "")
    sent = calls.begin(call, body.num_choices, num_retries(request), name)
    try:
        while len(answers) < body.num_choices:
            if len(sent.calls) == len(answers):
                sent.calls.append(calls.take(call, body.num_choices, name))
            answer = sent.calls[len(answers)].answer
            await settled(request, end_of(answer))
            answers.append(answer.result())
    except BaseException:
        calls.abandon(sent)  # it gets none of them now, and all of them if it comes back
        raise
    calls.remember(sent)
    completions = [completion_of(answer, body.model) for answer in answers]
    choices = [
        {**choice, "index": index} for index, each in enumerate(completions) for choice in each["choices"]
    ]
    counts = [each["usage"] for each in completions]
    num_sampled = sum(count["completion_tokens"] for count in counts)
    return {
        **completions[0],
        "choices": choices,
        "usage": usage_of(counts[0]["prompt_tokens"], num_sampled),
        "policy_version": min(each["policy_version"] for each in completions),
    }


def num_retries(request: Request) -> int:
    """Number of times that its client has sent a request before, as far as that names it."""
    number = request.headers.get(RETRY_HEADER, "")
    return int(number) if number.isdecimal() and len(number) < 10 else 0


async def body_of(request: Request) -> Json:
    """The JSON object of a request's body. Raises ``RequestError``."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is no JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError("The body has to be an object.")
    return body


def end_of(answer: Future[Json]) -> asyncio.Future[None]:
    """A future of this event loop that is done with ``answer``, which goes on where the future is cancelled.

    ``asyncio.wrap_future`` would tie both to each other, and what they hold to them, until garbage is sought.
    """
    loop = asyncio.get_running_loop()
    end = loop.create_future()

    def set_end() -> None:
        if not end.done():  # as it is where the client has gone
            end.set_result(None)

    def note(_: Future[Json]) -> None:
        with suppress(RuntimeError):  # the loop has ended with its listener
            loop.call_soon_threadsafe(set_end)

    answer.add_done_callback(note)
    return end


async def settled(request: Request, future: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Wait for ``future``, at most for ``seconds``, and return whether it is done.

    Args:
        request: one whose body was read.

    Raises:
        RequestError: 499 where the client goes before, 410 where the listener is closed.
    """
    gone = asyncio.ensure_future(request.receive())  # the body is read, so what comes is the client's end
    try:
        await asyncio.wait((future, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise RequestError("The client has gone before it had its answer.", status=499)
        return future.done()
    except asyncio.CancelledError as error:
        raise RequestError("The training that this server belongs to has ended.", status=410) from error
    finally:
        gone.cancel()


def _stream(events: list[Json], dialect: Dialect) -> str:
    """The events of an answer, which is there as a whole."""
    end = "" if dialect.terminator is None else f"data: {dialect.terminator}\n\n"
    return "".join(map(event, events)) + end


def _behind(answer: Response, request: Request, calls: ProgramCalls) -> Response:
    """An answer, with the entries behind it that the session server has not kept yet, where that calls."""
    first = request.headers.get(ENTRIES_HEADER, "")
    if first.isdecimal() and len(first) < 10:
        part = Part(bytes(answer.body), int(first), calls.entries[int(first) :])
        return Response(
            part.content, headers={**part.headers, "content-type": answer.headers["content-type"]}
        )
    return answer


def application(routes: Sequence[Route]) -> Starlette:
    """An application of ``routes`` whose errors name what is wrong, in the form that clients expect."""
    paths = ", ".join(sorted({route.path for route in routes}))

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(error, request.url.path)

    async def not_found(request: Request, _: Exception) -> Response:
        return error_response(
            RequestError(f"Nothing is here. This server has {paths}.", status=404), request.url.path
        )

    handlers = {TroupeError: failed, Exception: failed, 404: not_found, 405: not_found}
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(ResponsesSocket)])


@dataclass(frozen=True, slots=True)
class Listener:
    """An application that is served in a thread of this process."""

    url: str
    """Address without a path."""
    _server: uvicorn.Server
    _thread: threading.Thread

    def close(self) -> None:
        """Answer what is open, and listen no more."""
        self._server.should_exit = True
        self._thread.join()


def listen(app: Starlette, host: str) -> Listener:
    """Serve ``app`` at any free port until the listener is closed, or this process ends.

    Raises:
        OSError: the address cannot be listened on.
    """
    return serve(app, socket.create_server((host, 0)))


def serve(app: Starlette, listening: socket.socket) -> Listener:
    """Serve ``app`` at a listening socket, which closes with the listener."""
    for option, value in KEEP_ALIVE.items():  # connections inherit them
        listening.setsockopt(*option, value)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            ws_ping_interval=None,  # a busy program answers none, and connections have their own probes
            log_level="error",
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="gateway", daemon=True)
    thread.start()
    host, port = listening.getsockname()[:2]
    return Listener(f"http://{host}:{port}", server, thread)


@functools.cache
def gateway() -> Gateway:
    """The gateway of this process, which starts with the first rollout that needs it."""
    if NODE_ADDRESS in os.environ:  # a rollout actor's process: elsewhere all that a user has would stay
        gc.freeze()  # else walks over all modules are a tenth of the CPU time of its calls
    return Gateway()
