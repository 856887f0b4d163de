"""Pacing of HTTP requests: a few enter a process at a time, so that a crowd of them holds up no others.

Serve's proxy and the replicas are event loops. Of 500 requests that come at the same moment each would take
a small step in every round of the loop, and whoever asks something on the side would wait for all of them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from weakref import WeakKeyDictionary

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/health", "/ready")
"""Paths for probes, which often come by the address of a machine: they need no key and no name, wait for no
other request and are never too many."""
ROUTES_PATH = "/-/routes"
"""Path at which Serve's proxies show everybody what the cluster serves."""
AT_ONCE, SECONDS = 2, 0.002
"""Number of requests that begin in so many seconds. A busy loop has longer rounds, with as many in each."""
PROXY_ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:proxy_middlewares"}
"""Has Serve's proxies use ``AdmissionPacing``, where it is in the environment of Serve's controller."""


class HttpMiddleware(ABC):
    """ASGI middleware for requests over HTTP; all else goes by."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.handle if scope["type"] == "http" else self._app
        await answer(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, by the application if at all."""


class AdmissionPacing(HttpMiddleware):
    """Lets requests begin in the order in which they come, and not all at once."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        """Semaphores by loop: several may serve one application, one after the other."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == ROUTES_PATH:
            await Response(status_code=404)(scope, receive, send)
            return
        if scope["path"] not in OPEN_PATHS:
            loop = asyncio.get_running_loop()
            places = self._places.setdefault(loop, asyncio.Semaphore(AT_ONCE))
            await places.acquire()
            loop.call_later(SECONDS, places.release)
        await self._app(scope, receive, send)


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve's proxies put in front of all applications."""
    return [Middleware(AdmissionPacing)]
