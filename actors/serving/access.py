"""Access to the endpoints: who may send a request, from where, how many, and how long one may take.

``AccessControl`` stands in front of all routes of an application, whoever has added them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from ray import serve
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.serving.allowance import Allowance
from actors.serving.events import EVENTS, event
from actors.serving.intake import OPEN_PATH
from actors.serving.keys import ApiKeys, hostname, is_loopback, served_hosts
from actors.settings import ServerConfig
from policies.openai.protocol import OpenAIError

# Serve writes its own logger into the replica's log file, and no other one at this level.
logger = logging.getLogger("ray.serve")
MAX_LOGGED = 200
"""Characters of a path in the log, and of a name in an error."""


class Caller:
    """The client of a request, and what it may still use. Routes find it as ``request.state.caller``."""

    def __init__(self, name: str | None, requests: Allowance, tokens: Allowance) -> None:
        self.name = name
        self._requests, self._tokens = requests, tokens

    def charge_tokens(self, number: int) -> None:
        """Count tokens of a prompt or an answer."""
        self._tokens.spend(number)

    def charge_request(self) -> None:
        """Count one request."""
        self._requests.spend(1)

    def check_allowance(self) -> None:
        """Raise ``OpenAIError`` (429) where the caller has used too much."""
        for kind, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if seconds := allowance.seconds_to_wait():
                retry_after = math.ceil(seconds)
                raise OpenAIError(
                    429,
                    f"The key {self.name!r} has used its {kind} a minute: try again in {retry_after} s.",
                    type=kind,
                    code="rate_limit_exceeded",
                    retry_after=retry_after,
                )


class Access:
    """Who may use this replica, and how much.

    Args:
        keys: of the endpoint.
        config: ``server``. A replica allows its share of what a key may use.
    """

    def __init__(self, keys: ApiKeys, config: ServerConfig) -> None:
        access = config.access
        self.max_request_seconds = access.max_request_seconds
        self._max_open_requests = access.max_open_requests
        self._num_open = 0
        self._hosts = served_hosts(config)
        self._keys = keys
        limits = (access.requests_per_minute, access.tokens_per_minute)
        shares = [limit and limit / config.most_replicas for limit in limits]
        self._callers = {name: Caller(name, *map(Allowance, shares)) for name in keys.digests}
        self._anybody = Caller(None, Allowance(None), Allowance(None))

    @contextmanager
    def admitted(self, path: str, headers: Headers) -> Iterator[Caller]:
        """The caller of a request, which is open while the block lasts. Raises ``OpenAIError``."""
        self._check_address("Host", headers.get("host", ""))
        if (origin := headers.get("origin")) is not None:  # a browser sends it, for a page
            self._check_address("Origin", urlsplit(origin).netloc)
        if path == OPEN_PATH:
            yield self._anybody
            return
        caller = self._caller(headers)
        caller.check_allowance()
        if self._num_open >= self._max_open_requests:
            raise OpenAIError(
                503,
                f"{self._num_open} requests are open, which is as many as this replica takes: try again.",
                type="server_error",
                retry_after=1,
            )
        caller.charge_request()
        self._num_open += 1
        try:
            yield caller
        finally:
            self._num_open -= 1

    def _check_address(self, header: str, value: str) -> None:
        """A page that a browser has from elsewhere must not reach this server by a name of its own."""
        host = hostname(value)[:MAX_LOGGED]
        if not is_loopback(host) and host not in self._hosts:
            raise OpenAIError(
                403, f"{header} {host!r} is not served here: add it to server.access.hosts, if it should be."
            )

    def _caller(self, headers: Headers) -> Caller:
        if not self._keys:
            return self._anybody
        scheme, _, key = headers.get("authorization", "").partition(" ")
        name = self._keys.name_of(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
        if name is None:
            raise OpenAIError(
                401, "Send a key of this server, as `Authorization: Bearer KEY`.", code="invalid_api_key"
            )
        return self._callers[name]


class AccessControl:
    """ASGI middleware in front of all routes: it asks the replica's ``access``, and ends long requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access: Access = serve.get_replica_context().servable_object.access
        answer = _Answer(send)
        name, start = None, time.monotonic()
        try:
            with access.admitted(scope["path"], Headers(scope=scope)) as caller:
                name = caller.name
                scope.setdefault("state", {})["caller"] = caller
                await self._within(access.max_request_seconds, scope, receive, answer)
        except OpenAIError as error:
            logger.info("rejected: %s: %d, %s", _title(scope), error.status, error)
            await answer.end(error, scope, receive)
        finally:
            if name is not None:
                seconds = time.monotonic() - start
                logger.info("key %s: %s: %s, %.1f s", name, _title(scope), answer.status, seconds)

    async def _within(self, seconds: float, scope: Scope, receive: Receive, answer: _Answer) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not limit.expired():
                raise
            raise OpenAIError(
                504,
                f"The request took more than {seconds:g} s, the limit of this server: ask for fewer tokens.",
                type="server_error",
                code="request_timeout",
            ) from None


def _title(scope: Scope) -> str:
    """A request in a line of the log, which no client makes longer than this."""
    return f"{scope['method'][:20]} {scope['path'][:MAX_LOGGED]!r}"


@dataclass(slots=True)
class _Answer:
    """What was sent to the client so far."""

    sender: Send
    status: int | None = None
    is_stream: bool = False
    """Whether it is a stream of events."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = Headers(scope=message).get("content-type", "").startswith(EVENTS)
        await self.sender(message)

    async def end(self, error: OpenAIError, scope: Scope, receive: Receive) -> None:
        """Answer by the error. Where the answer has begun, its status is sent: a stream of events gets the
        error as its last event, and any other answer ends.
        """
        if self.status is None:
            await reject(error, scope, receive, self.send)
            return
        body = event(error.body()).encode() if self.is_stream else b""
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


async def reject(error: OpenAIError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read: the connection ends."""
    headers = {"connection": "close", **error.headers()}
    await JSONResponse(error.body(), status_code=error.status, headers=headers)(scope, receive, send)
