"""Requests that come all at once begin a few at a time, and a question for the health waits for none."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from actors.serving.intake import AT_ONCE, OPEN_PATHS, SECONDS, AdmissionPacing

COUNT = 40


class Application:
    """Notes when each request begins, and answers none before ``COUNT`` have."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.all_have_begun = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append((scope["path"], time.monotonic()))
        if len(self.begun) == COUNT:
            self.all_have_begun.set()
        await self.all_have_begun.wait()


async def crowd(paths: list[str]) -> list[tuple[str, float]]:
    """When each of ``paths`` begins, if all come at the same moment."""
    application = Application()
    paced = AdmissionPacing(application)
    # The application asks for nothing and says nothing.
    requests = [paced({"type": "http", "path": path}, None, None) for path in paths]  # type: ignore[arg-type]
    await asyncio.wait_for(asyncio.gather(*requests), 20)
    return application.begun


def test_requests_begin_in_order_a_few_at_a_time() -> None:
    paths = [f"/{number}" for number in range(COUNT)]
    begun = asyncio.run(crowd(paths))
    assert [path for path, _ in begun] == paths
    moments = [moment for _, moment in begun]
    for first, later in zip(moments, moments[AT_ONCE:], strict=False):
        assert later - first > 0.9 * SECONDS


def test_application_can_be_served_by_one_loop_after_other() -> None:
    application = Application()
    paced = AdmissionPacing(application)

    async def serve() -> None:
        application.begun.clear()
        requests = [paced({"type": "http", "path": "/"}, None, None) for _ in range(COUNT)]  # type: ignore[arg-type]
        await asyncio.wait_for(asyncio.gather(*requests), 20)

    for _ in range(2):
        application.all_have_begun = asyncio.Event()
        asyncio.run(serve())
        assert len(application.begun) == COUNT


def test_request_for_the_health_waits_for_no_other() -> None:
    paths = [f"/{number}" for number in range(COUNT - 1)]
    begun = asyncio.run(crowd([*paths, *OPEN_PATHS]))
    assert [path for path, _ in begun[: AT_ONCE + 2]] == [*paths[:AT_ONCE], *OPEN_PATHS]
