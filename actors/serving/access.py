"""Access to the endpoints: who may send a request, from where, how many, and how long one may take.

``AccessControl`` stands in front of all routes of an application, whoever has added them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from actors.serving.errors import error_form, reject
from actors.serving.events import EVENTS, event
from actors.serving.intake import OPEN_PATHS, HttpMiddleware
from actors.serving.keys import LIMITED, ApiKeys, KeysFile, hostname, is_loopback, served_hosts, unknown_key
from actors.serving.metrics import METRICS_PATH, NO_KEY, Metrics
from actors.settings import ServerConfig
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError
from policies.model_api.frontend import Charge

# Serve writes its own logger into the replica's log file, and no other one at this level.
logger = logging.getLogger("ray.serve")
OPEN_FOR_EACH_SAMPLED = 4
"""Open requests of a replica for each answer that it may sample: the others wait, or are being sent."""
MAX_LOGGED = 200
"""Characters of a path in the log, and of a name in an error."""
PROXY_PREFIX = re.compile(r"(/[\w.~-]+)*/?")
CORS_METHODS = "GET, POST, DELETE, OPTIONS"
SHOWN_HEADERS = "x-policy-version, x-troupe-recorded, x-dropped-fields, retry-after, mcp-session-id"
CORS_SECONDS = "600"


class TokenBucket:
    """Allows an amount a minute; what is not used is saved, up to one minute's amount.

    The cost of a request may be known only afterwards, so an allowance can be overdrawn: nothing is allowed
    until time has made up for it.

    Args:
        per_minute: ``None`` allows everything.
        clock: seconds that never go back.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._most = max(1.0, per_minute or 0)
        self._left = self._most
        self._clock = clock
        self._time = clock()

    def spend(self, amount: float) -> None:
        """Take ``amount`` away."""
        self._refill()
        self._left -= amount

    def seconds_to_wait(self) -> float:
        """Seconds until there is at least 1 left; 0 if there is now."""
        if self._per_minute is None:
            return 0.0
        self._refill()
        return max(0.0, (1 - self._left) * 60 / self._per_minute)

    def _refill(self) -> None:
        now = self._clock()
        if self._per_minute is not None:
            self._left = min(self._most, self._left + (now - self._time) * self._per_minute / 60)
        self._time = now


class Caller:
    """The client of a request, and what it may still use. Routes find it as ``request.state.caller``."""

    def __init__(
        self, name: str | None, metrics: Metrics, requests: TokenBucket, tokens: TokenBucket
    ) -> None:
        self.name, self._metrics = name, metrics
        self._requests, self._tokens = requests, tokens

    def charge_tokens(self, number: int) -> None:
        """Count tokens of a prompt or an answer."""
        self._tokens.spend(number)

    def charge_for(self, model: str) -> Charge:
        """Return the counter of the tokens of one request to ``model``."""
        return self._metrics.charge(model, self.name, self.charge_tokens)

    def charge_request(self) -> None:
        """Count one request."""
        self._requests.spend(1)

    def check_allowance(self) -> None:
        """Raise ``RequestError`` (429) where the caller has used too much."""
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if seconds := bucket.seconds_to_wait():
                retry_after = math.ceil(seconds)
                raise RequestError(
                    f"The key {self.name!r} has used its {unit} a minute: try again in {retry_after} s.",
                    status=429,
                    unit=unit,
                    code="rate_limit_exceeded",
                    retry_after=retry_after,
                )


class Access:
    """Access to one replica: which callers it has, and how much each may use.

    Args:
        keys: of the endpoint.
        config: ``server``. A replica allows its share of what a key may use.
    """

    def __init__(self, keys: ApiKeys, config: ServerConfig) -> None:
        access = config.access
        self.metrics = Metrics()
        self.max_request_seconds = access.max_request_seconds
        self._public_url = access.public_url
        self.path = urlsplit(access.public_url or "").path.rstrip("/")
        """The path of that address, which a proxy may leave in the requests that it sends on."""
        self._max_open_requests = OPEN_FOR_EACH_SAMPLED * access.max_sampled_answers
        self._num_open = 0
        self._hosts = served_hosts(config)
        self._file = None if keys.file is None else KeysFile(keys.file, keys)
        limits = [access.per_minute.get(unit) for unit in LIMITED]
        self._shares = [limit and limit / config.most_replicas for limit in limits]
        self._anybody = Caller(None, self.metrics, TokenBucket(None), TokenBucket(None))
        self._needs_key = False
        self._callers: dict[str, Caller] = {}
        self._use(keys)

    def _use(self, keys: ApiKeys) -> None:
        """Let these keys in, and no others. Who stays has used what it has used."""
        self._keys = keys
        self._needs_key |= bool(keys)  # a file that has lost its last key lets nobody in
        self._callers = {
            name: self._callers.get(name) or Caller(name, self.metrics, *map(TokenBucket, self._shares))
            for name in keys.digests
        }

    def address_for(self, request: Request) -> str:
        """The address by which a client reaches the server's root, without a slash at its end.

        It is that among ``server.access.hosts``, else the one that the client has sent its request to, with
        the prefix and the scheme that a proxy says it has taken off.
        """
        if self._public_url is not None:
            return self._public_url.rstrip("/")
        base = request.base_url
        scheme = request.headers.get("x-forwarded-proto", base.scheme)
        if scheme in ("http", "https"):
            base = base.replace(scheme=scheme)
        prefix = request.headers.get("x-forwarded-prefix", "")
        return str(base).rstrip("/") + (prefix.rstrip("/") if PROXY_PREFIX.fullmatch(prefix) else "")

    @contextmanager
    def admitted(self, path: str, headers: Headers) -> Iterator[Caller]:
        """The caller of a request, which is open while the block lasts. Raises ``RequestError``."""
        if path in OPEN_PATHS:
            yield self._anybody
            return
        if path != METRICS_PATH or not self._needs_key:  # Prometheus asks by the address of a machine
            self.check_addresses(headers)
        caller = self._caller(headers)
        caller.check_allowance()
        if self._num_open >= self._max_open_requests:
            raise RequestError(
                f"{self._num_open} requests are open, which is as many as this replica takes: try again.",
                status=503,
                retry_after=1,
            )
        caller.charge_request()
        self._num_open += 1
        try:
            yield caller
        finally:
            self._num_open -= 1

    def page_of(self, headers: Headers) -> str | None:
        """The page of ours that a browser asks for; ``None`` for all other requests."""
        origin = headers.get("origin")
        return origin if origin is not None and self._serves(hostname(_page_address(origin))) else None

    def check_addresses(self, headers: Headers) -> None:
        """Raise ``RequestError`` for a request to another name of the server, or from another one's page."""
        self._check_address("Host", headers.get("host", ""))
        if (origin := headers.get("origin")) is not None:  # a browser sends it, for a page
            self._check_address("Origin", _page_address(origin))

    def _check_address(self, header: str, value: str) -> None:
        """A page that a browser has from elsewhere must not reach this server by a name of its own."""
        host = hostname(value)[:MAX_LOGGED]
        if not self._serves(host):
            raise RequestError(
                f"{header} {host!r} is not served here: add it to server.access.hosts, if it should be.",
                status=403,
            )

    def _serves(self, host: str) -> bool:
        return is_loopback(host) or host in self._hosts

    def _caller(self, headers: Headers) -> Caller:
        if self._file is not None and (keys := self._file.changed()) is not None:
            self._use(keys)
        if not self._needs_key:
            return self._anybody
        if (name := self._keys.sender(headers)) is None:
            raise unknown_key("Send a key of this server")
        return self._callers[name]


class AccessControl(HttpMiddleware):
    """Stands in front of all routes: it asks the replica's ``access``, and ends long requests."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        access: Access = serve.get_replica_context().servable_object.access
        scope = _as_served(scope, access.path)
        headers = Headers(scope=scope)
        answer = _Answer(send, access.page_of(headers))
        name = None
        access.metrics.begin()
        try:
            if _is_preflight(scope, headers):
                access.check_addresses(headers)
                await _answer_preflight(scope, receive, answer.send)
                return
            with access.admitted(scope["path"], headers) as caller:
                name = caller.name
                scope.setdefault("state", {})["caller"] = caller
                await self._within(access.max_request_seconds, scope, receive, answer)
        except RequestError as error:
            logger.info("rejected: %s: %d, %s", _title(scope), status_of(error), error)
            await answer.end(error, scope, receive)
        except Exception as error:  # Starlette answers by it, in front of this
            answer.status = answer.status or status_of(error)
            raise
        finally:
            seconds = time.monotonic() - answer.start
            access.metrics.end(scope, answer.status, name, seconds, answer.first_seconds)
            if name is not None:
                logger.info("key %s: %s: %s, %.1f s", name or NO_KEY, _title(scope), answer.status, seconds)

    async def _within(self, seconds: float, scope: Scope, receive: Receive, answer: _Answer) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestError(
                f"The request took more than {seconds:g} s, the limit of this server: ask for fewer tokens.",
                status=504,
                code="request_timeout",
            ) from None


def _as_served(scope: Scope, path: str) -> Scope:
    """The request as the routes know it: without the public path, and a HEAD as the GET that it means."""
    changes = {"method": "GET"} if scope["method"] == "HEAD" else {}
    if path and scope["path"].startswith(f"{path}/"):
        changes |= {"path": scope["path"][len(path) :], "raw_path": scope.get("raw_path", b"")[len(path) :]}
    return {**scope, **changes}


def _page_address(origin: str) -> str:
    """The name and port of the server that a page is from; empty where they cannot be read."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _title(scope: Scope) -> str:
    """A request in a line of the log, which no client makes longer than this."""
    return f"{scope['method'][:20]} {scope['path'][:MAX_LOGGED]!r}"


# -- pages in browsers: which of them may read an answer (CORS) -----------------------------------------


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser asks what a page may do. It sends no key with it."""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


async def _answer_preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Allow a page whatever the routes have."""
    wanted = Headers(scope=scope).get("access-control-request-headers", "")
    headers = {
        "access-control-allow-methods": CORS_METHODS,
        "access-control-allow-headers": wanted,
        "access-control-max-age": CORS_SECONDS,
    }
    await Response(status_code=204, headers=headers)(scope, receive, send)


@dataclass(slots=True)
class _Answer:
    """Answer as far as it was sent to the client."""

    sender: Send
    page: str | None
    """The page in a browser that may read it."""
    start: float = field(default_factory=time.monotonic)
    """The time at which the request came."""
    status: int | None = None
    is_stream: bool = False
    """True for a stream of events."""
    first_seconds: float | None = None
    """Time of the first event."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            self.status = message["status"]
            self.is_stream = headers.get("content-type", "").startswith(EVENTS)
            if self.page is not None:
                headers["access-control-allow-origin"] = self.page
                headers["access-control-expose-headers"] = SHOWN_HEADERS
                headers.add_vary_header("origin")
        elif self.is_stream and self.first_seconds is None:
            self.first_seconds = time.monotonic() - self.start
        await self.sender(message)

    async def end(self, error: RequestError, scope: Scope, receive: Receive) -> None:
        """Answer by the error. Where the answer has begun, its status is sent: a stream of events gets the
        error as its last event, and any other answer ends.
        """
        if self.status is None:
            await reject(error, scope, receive, self.send)
            return
        body = event(error_form(error, scope["path"])[1]).encode() if self.is_stream else b""
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
