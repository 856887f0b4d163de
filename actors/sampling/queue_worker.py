"""A policy replica's connection to one sampling actor: it fetches requests and hands in answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from actors.sampling.request_queue import LEASE_SECONDS, Assignment, ReplicaReport
from environments.errors import ConfigError, LogprobError, PromptTooLongError, SamplerError
from policies.engines.base import Engine
from policies.sampler import TokenOutput, TokenRequest

BATCH_SECONDS = 0.02
"""How long an answer waits for others that can be handed in with it."""


class QueueWorker:
    """Calls a ``RequestQueue``: one call is always waiting there, and each takes along what is finished.

    Args:
        replica: this replica's name, for messages.
        engine: answers requests.
        poll: the queue's ``poll``, wherever the queue is.
        catch_up: loads the newest weights; asked for after a time in which this process may have stood still.
    """

    def __init__(
        self,
        replica: str,
        engine: Engine,
        poll: Callable[[ReplicaReport], Awaitable[Assignment]],
        catch_up: Callable[[], Awaitable[None]],
    ) -> None:
        self._replica, self._engine = replica, engine
        self._poll, self._catch_up = poll, catch_up
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answers: list[tuple[str, TokenOutput | Exception]] = []
        self._news = asyncio.Event()
        self._newest_call: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There is something to tell, such as another version: call now."""
        self._news.set()

    async def run(self) -> None:
        """consumes requests · waits for the queue and the engine · produces an answer for each

        Raises:
            SamplerError: the engine has failed. What it has not answered is left to other replicas.
            What ``poll`` raises: the queue is gone.
        """
        try:
            while True:
                start = time.monotonic()
                self._engine.check_alive()
                self._news.clear()
                earlier = self._newest_call
                self._newest_call = asyncio.create_task(self._call())
                self._newest_call.add_done_callback(self._call_ended)
                if earlier is not None:
                    await earlier  # the queue ends it, now that there is a newer one
                await self._news.wait()
                if self._running:  # what is finished in the same moment goes along
                    await asyncio.sleep(BATCH_SECONDS)
                await self._catch_up_after_a_stop(start)
        finally:
            for task in (*self._running.values(), *([self._newest_call] if self._newest_call else [])):
                task.cancel()

    def _call_ended(self, call: asyncio.Task[None]) -> None:
        if call is self._newest_call:  # else it was ended by a newer one, which is no reason for another
            self._news.set()

    async def _call(self) -> None:
        start = time.monotonic()
        answers, self._answers = self._answers, []
        report = ReplicaReport(self._replica, self._engine.version, answers, self._engine.stats())
        assignment = await self._poll(report)
        await self._catch_up_after_a_stop(start)
        for ticket in assignment.revoked:
            if ticket in self._running:
                self._running.pop(ticket).cancel()
        for ticket, request in assignment.requests:
            self._running[ticket] = asyncio.create_task(self._answer(ticket, request))

    async def _catch_up_after_a_stop(self, start: float) -> None:
        """Whoever has stood still does not know what was published meanwhile."""
        if time.monotonic() - start > LEASE_SECONDS:
            await self._catch_up()

    async def _answer(self, ticket: str, request: TokenRequest) -> None:
        answer: TokenOutput | Exception
        try:
            answer = await self._engine.generate(request.prompt_ids, request.params)
        except (ConfigError, PromptTooLongError, LogprobError) as error:
            answer = error
        except SamplerError:  # the engine's end, which is no answer: run() finds out
            self._news.set()
            return
        del self._running[ticket]
        self._answers.append((ticket, answer))
        self._news.set()
