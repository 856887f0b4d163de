"""Pages in browsers: which of them may read an answer (CORS). Whose pages they are is checked before."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

METHODS = "GET, POST, DELETE, OPTIONS"
SHOWN_HEADERS = "x-policy-version, retry-after, mcp-session-id"
KEPT_SECONDS = "600"


def is_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether a browser asks what a page may ask for. It sends no key with it."""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


async def answer_preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Allow a page whatever the routes have."""
    wanted = Headers(scope=scope).get("access-control-request-headers", "")
    headers = {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": wanted,
        "access-control-max-age": KEPT_SECONDS,
    }
    await Response(status_code=204, headers=headers)(scope, receive, send)


def allow_page(origin: str | None, send: Send) -> Send:
    """``send``, which lets the page ``origin`` read the answer."""
    if origin is None:
        return send

    async def allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = SHOWN_HEADERS
            headers.add_vary_header("origin")
        await send(message)

    return allowing
