"""Responses over a websocket, at servers of policies and gateways: each frame is a POST to the application.

So keys, limits, counts and recordings hold for a frame as for any request, and a client is let in where its
``GET /v1/models`` is answered. https://developers.openai.com/api/docs/guides/websocket-mode
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.serving.errors import MODELS_PATH, RESPONSES_PATH, error_form, reject
from policies.model_api.dialects.base import DONE
from policies.model_api.dialects.responses_draft import ENDS
from policies.model_api.errors import InvalidRequestError, UnavailableError

Json = dict[str, Any]

logger = logging.getLogger("ray.serve")
CONNECTION_SECONDS = 3600.0
"""Time after which a connection takes no further frame, as at OpenAI."""
MAX_CONNECTIONS = 1000
"""Open connections of an application: each may hold a conversation as large as a body, and frames."""
MAX_WAITING = 2**24
"""Characters of a connection's frames that wait for their answers: as many as uvicorn takes in one frame."""
AFTER = "after"
"""Key in a request's ``state``: the response that it goes on from, though its ``input`` has all of that."""


class ResponsesSocket:
    """ASGI middleware that answers websockets by requests to the application behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        self._num_open += 1
        try:
            await receive()  # the handshake
            if self._num_open > MAX_CONNECTIONS:
                error = UnavailableError(f"{MAX_CONNECTIONS} connections are open: try again.", retry_after=1)
                await reject(error, scope, receive, send)
            else:
                await _Connection(self._app, scope, send).serve(receive)
        finally:
            self._num_open -= 1


@dataclass(frozen=True, slots=True)
class _Newest:
    """The last response with ``store: false``, from which only its own connection goes on."""

    response_id: str | None = None
    after: str | None = None
    """The response before ``items``, which the application keeps."""
    items: Sequence[Json] = ()


@dataclass(slots=True)
class _Connection:
    """A client's connection, whose frames are answered one after the other."""

    app: ASGIApp
    scope: Scope
    send: Send
    frames: asyncio.Queue[str | bytes | None] = field(default_factory=asyncio.Queue)
    """Frames that wait, and ``None`` behind them when the client has gone."""
    num_waiting: int = 0
    """Characters of the frames that wait."""
    reading: asyncio.Task[None] = field(init=False)
    """Ends when the client has gone, also while frames of it wait."""
    newest: _Newest = _Newest()

    async def serve(self, receive: Receive) -> None:
        """Answer frames until the client goes, or has been there for too long."""
        self.reading = asyncio.create_task(self._read(receive))
        is_admitted = False

        async def admit(message: Message) -> None:
            nonlocal is_admitted
            is_admitted |= message.get("status") == 200
            if not is_admitted:
                await self.send({**message, "type": f"websocket.{message['type']}"})

        try:
            await self._request("GET", MODELS_PATH, admit)
            if is_admitted and not self.reading.done():
                await self.send({"type": "websocket.accept"})
                await self._answer_all()
        finally:
            self.reading.cancel()

    async def _read(self, receive: Receive) -> None:
        """Take frames in, all at once: behind Serve's proxy nothing holds back those that are not taken."""
        try:
            while (message := await receive())["type"] == "websocket.receive":
                frame = message.get("text") or message.get("bytes") or ""
                self.num_waiting += len(frame)
                if self.num_waiting > MAX_WAITING:
                    break
                self.frames.put_nowait(frame)
        finally:
            self.frames.put_nowait(None)

    async def _answer_all(self) -> None:
        end = time.monotonic() + CONNECTION_SECONDS
        with suppress(TimeoutError):
            while (frame := await asyncio.wait_for(self.frames.get(), end - time.monotonic())) is not None:
                if self.reading.done():
                    break
                self.num_waiting -= len(frame)
                await self._answer(frame)
            if self.num_waiting > MAX_WAITING:
                reason = f"More than {MAX_WAITING} characters wait for their answers."
                await self.send({"type": "websocket.close", "code": 1009, "reason": reason})
            return
        error = InvalidRequestError(
            f"A connection is open for {CONNECTION_SECONDS:g} s at most: open another one.",
            code="websocket_connection_limit_reached",
        )
        await _Answer(self.send).fail(error)
        await self.send({"type": "websocket.close", "code": 1000})

    async def _answer(self, frame: str | bytes) -> None:
        answer = _Answer(self.send)

        def body(state: Json) -> bytes:
            given = _body_of(frame)
            state[AFTER] = answer.earlier = earlier = given.get("previous_response_id")
            answer.before = before = (
                self.newest if earlier == self.newest.response_id else _Newest(after=earlier)
            )
            answer.items = [*before.items, *_items_of(given.get("input"))]
            whole = {**given, "previous_response_id": before.after, "stream": True}
            if before.items:
                whole["input"] = answer.items
            # Half surrogate pairs, which have no UTF-8, are read again from this.
            return json.dumps(whole, ensure_ascii=False).encode(errors="surrogatepass")

        try:
            await self._request("POST", RESPONSES_PATH, answer.take, body, len(frame))
        except Exception as error:
            logger.exception("A request over a websocket has failed.")
            await answer.fail(error)
        if answer.response is None and answer.before is self.newest:
            self.newest = _Newest()
        elif answer.response is not None and not answer.response["store"]:
            items = [*answer.items, *answer.response["output"]]
            self.newest = _Newest(answer.response["id"], answer.before.after, items)

    async def _request(
        self,
        method: str,
        path: str,
        send: Send,
        body: Callable[[Json], bytes] = lambda _: b"",
        num_bytes: int = 0,
    ) -> None:
        """Have the application answer a request, which comes with the headers of the handshake.

        It is cancelled where the client goes, as Serve cancels a request.

        Args:
            body: makes the body, and changes the request's ``state``, once the application has let the client
                in and has found ``num_bytes`` to be few enough.
        """
        own = {b"content-type": b"application/json", b"content-length": str(num_bytes).encode()}
        request = {
            **self.scope,
            "type": "http",
            "method": method,
            "path": self.scope["path"].removesuffix(RESPONSES_PATH) + path,
            "headers": [*(each for each in self.scope["headers"] if each[0] not in own), *own.items()],
            "state": (state := {**self.scope.get("state", {})}),
        }
        bodies = iter([body])

        async def receive() -> Message:
            for each in bodies:
                return {"type": "http.request", "body": each(state), "more_body": False}
            return await asyncio.Future()

        answering = asyncio.ensure_future(self.app(request, receive, send))
        try:
            await asyncio.wait((answering, self.reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering


@dataclass(slots=True)
class _Answer:
    """The answer to a frame, made of the application's answer over HTTP."""

    sender: Send
    earlier: str | None = None
    """The response that the client goes on from."""
    status: int = 200
    rest: bytes = b""
    """Bytes after the last whole event."""
    response: Json | None = None
    """The response, once it is complete."""
    before: _Newest = _Newest()
    items: Sequence[Json] = ()
    """The items behind the response that the application keeps, up to the answer."""

    async def take(self, message: Message) -> None:
        """Take in a part of the answer over HTTP."""
        self.status = message.get("status", self.status)
        self.rest += message.get("body", b"")
        if self.status != 200:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await self._send_error(self.status, json.loads(self.rest)["error"])
            return
        *events, self.rest = self.rest.split(b"\n\n")
        for event in events:
            data = event.partition(b"data: ")[2]
            if data != DONE.encode():
                await self._pass_on(json.loads(data))

    async def fail(self, error: Exception) -> None:
        """End by an error."""
        status, body = error_form(error, RESPONSES_PATH)
        await self._send_error(status, body["error"])

    async def _pass_on(self, event: Json) -> None:
        if "type" not in event:  # it has failed after its first event, with which its status was sent
            status = 500 if event["error"]["type"] == "server_error" else 400
            await self._send_error(status, event["error"])
            return
        if "response" in event:
            event["response"]["previous_response_id"] = self.earlier
            if event["type"] in ENDS:
                self.response = event["response"]
        await self._send(event)

    async def _send_error(self, status: int, error: Json) -> None:
        named = {**error, "code": error["code"] or error["type"]}  # clients want a text there
        await self._send({"type": "error", "status": status, "error": named})

    async def _send(self, event: Json) -> None:
        with suppress(OSError):  # the client has gone, of which a message comes too
            await self.sender({"type": "websocket.send", "text": json.dumps(event)})


def _body_of(frame: str | bytes) -> Json:
    """The body of the request that a frame is. Raises ``InvalidRequestError``."""
    try:
        body = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The frame is no JSON: {error}.") from error
    if not isinstance(body, dict) or body.pop("type", None) != "response.create":
        raise InvalidRequestError(
            'No other frames are served than {"type": "response.create", "model": ...}.', param="type"
        )
    if body.pop("stream", True) is not True:
        raise InvalidRequestError("stream: all answers are streams here: leave it out.", param="stream")
    return body


def _items_of(given: Any) -> list[Any]:
    """The items of an ``input``; what is no list of them is an item that the application refuses."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else [] if given is None else [given]
